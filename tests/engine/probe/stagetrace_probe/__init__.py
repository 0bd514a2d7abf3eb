"""Test only: lets a test look into the processes of a live server.

On SIGUSR2 a process writes its modules, its threads and which of its methods are wrapped to ``PROBE_DIR/PID.json``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import Any


def install() -> None:
    """Entry point ``vllm.general_plugins``."""
    if os.environ.get("PROBE_DIR") and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR2, _dump)


def _dump(_number: int, _frame: Any) -> None:
    found = {
        "modules": sorted(sys.modules),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "wrapped": _wrapped(),
        "device": _device(),
    }
    path = os.path.join(os.environ["PROBE_DIR"], f"{os.getpid()}.json")
    with open(path + ".part", "w") as file:
        json.dump(found, file)
    os.replace(path + ".part", path)


def _device() -> dict[str, int]:
    """The calls of the device on paper, where there is one; see ../../gpupath/README.md."""
    module = sys.modules.get("gpu_default_path.device")
    return dict(module.StrictEvent.device.counts) if module is not None else {}


def _wrapped() -> list[str]:
    """Every method of an imported vLLM or FastAPI class that is a wrapper."""
    names = []
    for name, module in list(sys.modules.items()):
        if not name.startswith(("vllm.v1", "vllm.renderers", "vllm.entrypoints", "fastapi.applications")):
            continue
        for owner in list(vars(module).values()):
            if isinstance(owner, type) and owner.__module__ == name:
                for attribute, value in list(vars(owner).items()):
                    if type(value).__name__ == "FunctionWrapper":
                        names.append(f"{name}:{owner.__name__}.{attribute}")
    return sorted(names)
