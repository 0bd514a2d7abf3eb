"""Fixtures of several unit tests."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from stagetrace import session
from tests.unit.helpers import Engine


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A session directory as :func:`stagetrace.session.check` wants it."""
    made = tmp_path / "session"
    made.mkdir(mode=0o700)
    return made


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where sessions of this test, and of the processes it starts, are made."""
    made = tmp_path / "base"
    made.mkdir()
    monkeypatch.setenv(session.BASE_ENV, str(made))
    monkeypatch.delenv(session.ENV, raising=False)
    monkeypatch.delenv("STAGETRACE", raising=False)
    return made


@dataclass
class Small:
    """A place with little room. ``limit`` goes into ``preexec_fn`` of whoever writes there."""

    directory: Path
    limit: Callable[[], None] | None

    def fill(self) -> None:
        """Leave no room at all; nothing to do where the limit is the process's own."""
        if self.limit is None:
            with open(self.directory / "filler", "wb", buffering=0) as file:
                try:
                    while True:
                        file.write(bytes(4096))
                except OSError:
                    return


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Small]:
    """A tmpfs of 1 MiB; where mounting is not allowed, processes whose files may not grow beyond 1 MiB."""
    place = tmp_path / "small"
    place.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=0700", "none", str(place)]
    mounted = shutil.which("mount") and subprocess.run(mount, capture_output=True).returncode == 0
    if not mounted:
        yield Small(place, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)))
        return
    try:
        yield Small(place, None)
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    """Make packages to hook; they are forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    made: list[Engine] = []

    def make(**sources: str) -> Engine:
        made.append(Engine(tmp_path, **sources))
        return made[-1]

    yield make
    for name in [name for name in sys.modules if name.partition(".")[0] in {each.name for each in made}]:
        del sys.modules[name]
