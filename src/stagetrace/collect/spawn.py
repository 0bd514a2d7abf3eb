"""Start a collector beside an engine that was not started by ``stagetrace run``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any


def spawn(directory: Path, options: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Start ``python -m stagetrace.collect``; it ends by itself after the last writer has.

    In a session of its own, so that a Ctrl-C meant for the server does not end it before the server has ended.
    """
    command = [sys.executable, "-m", "stagetrace.collect", str(directory)]
    if options.get("store"):
        command += ["--store", str(options["store"])]
    if options.get("store_max"):
        command += ["--store-max", str(options["store_max"])]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
