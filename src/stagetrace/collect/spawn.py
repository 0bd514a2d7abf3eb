"""Start a collector beside an engine that was not started by ``stagetrace run``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def spawn(directory: Path, options: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Start ``python -m stagetrace.collect``; it ends by itself after the last writer has.

    In a process group of its own, so that a Ctrl-C meant for the server does not end it first; but not in a session
    of its own: schedulers weigh sessions against each other, and the collector would starve beside a busy engine.
    """
    command = [sys.executable, "-m", "stagetrace.collect", str(directory)]
    for name in ("store", "store_max", "otlp", "prometheus", "sample"):
        if options.get(name) not in (None, ""):
            command.append(f"--{name.replace('_', '-')}={options[name]}")
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=os.setpgrp)
