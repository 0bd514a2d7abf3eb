"""Programs that tests need and Debian has."""

from __future__ import annotations

import os
import shutil
import subprocess


def program(name: str, *packages: str) -> str:
    """The path of ``name``; its ``packages`` are installed where we may, else we say how."""
    if not shutil.which(name) and os.geteuid() == 0 and shutil.which("apt-get"):
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
            subprocess.run(["apt-get", *command], timeout=130, env=environment, check=False, **quiet)
    found = shutil.which(name)
    assert found, f"this test needs {name}: apt-get install --no-install-recommends {' '.join(packages)}"
    return found
