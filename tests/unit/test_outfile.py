"""Files that commands write: where the name leads, and whole or not at all."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from stagetrace import outfile
from stagetrace.outfile import STDOUT, writing
from tests.unit.helpers import DEADLINE_S


def write(path: Path, text: str = "new\n") -> None:
    with writing(path) as file:
        file.write(text)


def test_a_new_file_is_its_owners_and_one_that_is_there_keeps_its_mode(tmp_path: Path) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    old.write_text("old")
    old.chmod(0o640)
    write(new)
    write(old)
    assert [(p.read_text(), stat.S_IMODE(p.stat().st_mode)) for p in (new, old)] == [("new\n", 0o600), ("new\n", 0o640)]


def test_a_link_stays_and_its_target_is_replaced_whole(tmp_path: Path) -> None:
    folder = tmp_path / "there"
    folder.mkdir()
    target, link, chain = folder / "target", tmp_path / "link", tmp_path / "chain"
    target.write_text("old")
    link.symlink_to("there/target")
    chain.symlink_to(link)
    before = target.stat().st_ino
    assert outfile.replaced(chain) == target and outfile.folder(chain) == folder
    write(chain)
    assert chain.is_symlink() and link.is_symlink() and target.read_text() == "new\n"
    assert target.stat().st_ino != before, "replaced, not written over"


def test_a_link_to_nothing_gets_its_target(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("target")
    assert outfile.replaced(link) is None
    write(link)
    assert link.is_symlink() and (tmp_path / "target").read_text() == "new\n"


def test_what_fails_leaves_what_was_there_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), writing(path) as file:
        file.write("half")
        raise ZeroDivisionError
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_links_in_a_circle_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError) as caught:
        write(tmp_path / "a")
    assert caught.value.errno == errno.ELOOP


@pytest.mark.parametrize("linked", [False, True])
def test_a_descriptor_is_written_where_it_stands(linked: bool, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("before\n")
    with open(path, "ab") as log:
        name = Path(f"/dev/fd/{log.fileno()}")
        if linked:
            (tmp_path / "link").symlink_to(name)
            name = tmp_path / "link"
        inode = path.stat().st_ino
        assert outfile.replaced(name) is None and outfile.folder(name) is None
        write(name)
        log.write(b"after\n")
    assert path.read_text() == "before\nnew\nafter\n" and path.stat().st_ino == inode
    assert not linked or (tmp_path / "link").is_symlink()


def test_a_descriptor_that_is_a_pipe(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    write(Path(f"/dev/fd/{writer}"))
    os.close(writer)
    with open(reader, encoding="utf-8") as pipe:
        assert pipe.read() == "new\n"
    with pytest.raises(OSError):
        write(Path(f"/dev/fd/{writer}"))


def test_a_named_pipe_is_written_as_it_is(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    held = os.open(fifo, os.O_RDWR)
    assert outfile.replaced(fifo) is None
    write(fifo)
    assert os.read(held, 100) == b"new\n" and stat.S_ISFIFO(fifo.stat().st_mode)
    os.close(held)


def test_a_dash_is_stdout_and_no_file(tmp_path: Path) -> None:
    code = """
from stagetrace.outfile import STDOUT, writing
print("first")
with writing(STDOUT) as file:
    file.write("\\u00e9\\n")
print("last")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stdout.decode()) == (0, "first\né\nlast\n"), done.stderr
    assert not list(tmp_path.iterdir())


def test_what_leads_to_stdout(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/proc/self/fd/1")
    assert all(map(outfile.to_stdout, (STDOUT, tmp_path / "link", Path("/dev/fd/1"))))
    assert not any(map(outfile.to_stdout, (tmp_path / "-", Path("/dev/fd/2"), Path("1"))))
