"""Terminals that know few letters: no command fails for one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.helpers import DEADLINE_S
from tests.unit.test_cli import store

FEW = [{"PYTHONIOENCODING": "latin-1"}, {"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}]


@pytest.mark.parametrize("few", FEW, ids=str)
@pytest.mark.parametrize("command", [("numbers", "s.db"), ("stages", "s.db"), ("stages", "--markdown")], ids=str)
def test_letters_that_are_not_there_are_others(command: tuple[str, ...], few: dict[str, str], tmp_path: Path) -> None:
    store(tmp_path / "s.db")
    line = [sys.executable, "-m", "stagetrace", *command]
    environment = {**os.environ, **few}
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"prefill" in done.stdout and b"?" not in done.stdout


def test_a_file_name_that_is_no_text_is_shown_in_one_line(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "stagetrace", "stages", os.fsdecode(b"\xff\x1b.db")]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, timeout=DEADLINE_S)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert b"\x1b" not in done.stderr
