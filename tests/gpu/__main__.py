"""Run the parts, and write what they found as JSON. ``tests/gpu/run.sh`` calls this; see there."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tests.gpu import engines, events, nvml
from tests.gpu.part import NotHere, Part

SCHEMA = 1
#: No engine is started later than this: the whole is to take 8 minutes.
BUDGET_S = 480.0
PARTS: dict[str, Callable[[Part], None]] = {
    "events-eager": events.eager,
    "events-graph": events.graph,
    "events-overlapped": events.overlapped,
    "no-synchronisation": events.no_synchronisation,
    "overhead": events.overhead,
    "nvml": nvml.against_nvidia_smi,
    **engines.PARTS,
}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="tests.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="without a GPU, on a device on paper: tries this program, measures nothing",
    )
    asked = parser.parse_args(arguments)
    unknown = set(asked.parts.split(",")) - PARTS.keys()
    if unknown:
        parser.error(f"--parts: there is no {', '.join(sorted(unknown))}; choose from {', '.join(PARTS)}")
    if not asked.out.parent.is_dir():
        parser.error(f"--out: there is no directory {asked.out.parent}")
    until = time.monotonic() + BUDGET_S
    found = [run(name, asked.rehearse, until) for name in asked.parts.split(",")]
    document = {
        "schema": SCHEMA, "taken_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "rehearsal": asked.rehearse,
        "machine": machine(), "parts": [part.document() for part in found],
    }  # fmt: skip
    asked.out.write_text(json.dumps(document, indent=1) + "\n")
    for part in found:
        print(part.words())
    print(f"written: {asked.out}")
    return verdict(found)


def run(name: str, rehearse: bool, until: float) -> Part:
    """One part, whatever becomes of it."""
    part = Part(name, rehearse, until)
    begun = time.monotonic()
    try:
        PARTS[name](part)
        part.done()
    except NotHere as why:
        part.state, part.reason = "not_run", str(why)
    except Exception as error:
        part.state, part.reason = "failed", f"{type(error).__name__}: {error}"
    part.seconds = time.monotonic() - begun
    return part


def verdict(parts: list[Part]) -> int:
    """The exit code."""
    states = {part.state for part in parts}
    if "failed" in states:
        return 1
    return 0 if states & {"passed"} else 3


def machine() -> dict[str, Any]:
    """What it was measured on; null where that is not known."""
    return {
        "system": platform.platform(), "cpus": os.cpu_count(), "python": platform.python_version(),
        **{name: installed(name) for name in ("torch", "vllm", "nvidia-ml-py", "stagetrace")}, **events.gpu(),
    }  # fmt: skip


def installed(name: str) -> str | None:
    """The version of a distribution."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
