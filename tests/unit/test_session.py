"""Session directories: what is refused, what is inherited, and whose are cleaned up."""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stagetrace import session
from tests.unit.conftest import Small
from tests.unit.helpers import DEADLINE_S, craft, python

root_only = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")


@pytest.fixture
def dead() -> int:
    """The number of a process that is gone."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.fixture
def other() -> Iterator[int]:
    """The number of a process that lives."""
    process = subprocess.Popen(["sleep", "600"])
    yield process.pid
    process.kill()
    process.wait()


def made(base: Path, owner: object, namespace: str | None = None, name: str = "x") -> Path:
    directory = base / f"stagetrace-{os.getuid()}-{name}"
    directory.mkdir(mode=0o700)
    space = os.readlink("/proc/self/ns/pid") if namespace is None else namespace
    (directory / session.OWNER).write_text(f"{owner} {space}")
    return directory


def age(directory: Path) -> None:
    """Make it an hour old."""
    then = time.time() - 3600
    os.utime(directory, (then, then))


# ---------------------------------------------------------------- making and checking


def test_a_new_session_is_ours_alone(base: Path) -> None:
    before = os.umask(0)
    try:
        directory = session.create()
    finally:
        os.umask(before)
    assert directory.parent == base
    assert session.check(directory) == directory
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()] == [0o600]
    assert session.owner(directory) == os.getpid()
    assert session.create() != directory


def test_sessions_lie_on_tmpfs_unless_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(session.BASE_ENV, raising=False)
    assert session.base() == Path("/dev/shm")
    monkeypatch.setenv(session.BASE_ENV, "")
    assert session.base() == Path("/dev/shm")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(session.BASE_ENV, "here")
    assert session.base() == tmp_path / "here", "children may run in another directory"


@pytest.mark.parametrize("place", ["missing", "a file"])
def test_no_place_for_a_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    (tmp_path / "a file").touch()
    monkeypatch.setenv(session.BASE_ENV, str(tmp_path / place))
    with pytest.raises(session.SessionError) as caught:
        session.create()
    line = str(caught.value)
    assert str(tmp_path / place) in line
    assert session.BASE_ENV in line
    assert len(line.splitlines()) == 1
    assert session.live() == []
    assert session.remove_stale() == 0


def test_no_room_for_a_session_leaves_nothing_behind(small: Small) -> None:
    small.fill()
    code = """
        import os, resource, sys
        from stagetrace import session
        if sys.argv[1] == "limit":
            resource.setrlimit(resource.RLIMIT_FSIZE, (1, 1))
        try:
            session.create()
        except session.SessionError as error:
            print(error)
    """
    done = python(code, "limit" if small.limit else "full", **{session.BASE_ENV: str(small.directory)})
    assert done.stdout.startswith(f"no session under {small.directory}: "), done.stderr
    assert [path.name for path in small.directory.iterdir() if path.is_dir()] == []


def refusal(directory: Path) -> str:
    with pytest.raises(session.SessionError) as caught:
        session.check(directory)
    line = str(caught.value)
    assert str(directory) in line
    assert len(line.splitlines()) == 1
    return line


@pytest.mark.parametrize("mode", [0o701, 0o710, 0o755, 0o777, 0o1777])
def test_a_directory_open_to_others_is_refused(directory: Path, mode: int) -> None:
    directory.chmod(mode)
    assert "chmod 700" in refusal(directory)


def test_links_files_and_nothing_are_refused(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(directory)
    assert "links are refused" in refusal(tmp_path / "link")
    assert "links are refused" in refusal(Path(f"{tmp_path / 'link'}/"))
    (tmp_path / "file").touch(0o700)
    assert "not a directory" in refusal(tmp_path / "file")
    assert "No such file" in refusal(tmp_path / "gone")
    assert "Not a directory" in refusal(tmp_path / "file" / "in it")


@root_only
def test_somebody_else_s_directory_is_refused(directory: Path) -> None:
    os.chown(directory, 12345, 12345)
    assert "uid 12345" in refusal(directory)


def test_somebody_else_s_directory_is_refused_without_being_root(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert "not to 12345" in refusal(directory)


def test_children_inherit_the_session(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "from stagetrace import session; print(session.current())"
    assert python(code).stdout.strip() == "None"
    assert python(code, **{session.ENV: ""}).stdout.strip() == "None"
    assert python(code, **{session.ENV: str(directory)}).stdout.strip() == str(directory)
    directory.chmod(0o755)
    assert "SessionError" in python(code, **{session.ENV: str(directory)}).stderr


# ---------------------------------------------------------------- alive or not


def test_alive(dead: int, other: int) -> None:
    assert session.alive(os.getpid())
    assert session.alive(other)
    assert not session.alive(dead)
    assert not session.alive(0)
    zombie = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    assert not session.alive(zombie.pid)
    zombie.wait()


def test_a_process_with_a_wild_name_is_alive(tmp_path: Path) -> None:
    """The name stands in parentheses in /proc and may hold some of its own."""
    wild = tmp_path / "a) Z (b"
    wild.symlink_to("/bin/sleep")
    process = subprocess.Popen([str(wild), "600"])
    assert session.alive(process.pid)
    process.kill()
    process.wait()
    assert not session.alive(process.pid)


def test_stale_sessions_go_live_ones_stay(base: Path, dead: int, other: int) -> None:
    stale = made(base, dead, name="stale")
    craft(stale / f"ring-{dead}-0-0")
    written = made(base, dead, name="written")
    craft(written / f"ring-{other}-0-0")
    collected = made(base, other, name="collected")
    own = session.create()
    assert set(session.live()) == {collected, own}
    assert session.remove_stale() == 1
    assert set(base.iterdir()) == {written, collected, own}


def test_what_is_not_a_session_of_ours_is_left_alone(base: Path, dead: int, tmp_path: Path) -> None:
    """Only a checked directory of our own that says who collected it is ever removed."""
    kept = [made(base, text, namespace="", name=str(i)) for i, text in enumerate(["", "x", "12x 4", "\0"])]
    unclaimed = base / f"stagetrace-{os.getuid()}-unclaimed"
    unclaimed.mkdir(mode=0o700)
    shared = made(base, dead, name="shared")
    shared.chmod(0o755)
    linked = base / f"stagetrace-{os.getuid()}-link"
    target = made(tmp_path, dead, name="target")
    linked.symlink_to(target)
    file = base / f"stagetrace-{os.getuid()}-file"
    file.write_text(str(dead))
    foreign = base / "stagetrace-12345-x"
    made(base, dead, name="named").rename(foreign)
    assert session.remove_stale() == 0
    assert session.live() == []
    assert set(base.iterdir()) == {*kept, unclaimed, shared, linked, file, foreign}
    assert (target / session.OWNER).exists()


@root_only
def test_a_stale_session_of_somebody_else_stays(base: Path, dead: int) -> None:
    theirs = made(base, dead)
    os.chown(theirs, 12345, 12345)
    assert session.remove_stale() == 0
    assert theirs.exists()


@pytest.mark.parametrize("name", ["ring-x-0-0", "ring-", "ring--", "ring-²-0", "ring-1e9-0"])
def test_a_file_with_a_strange_name_is_nobody_s_ring(base: Path, dead: int, name: str) -> None:
    """`stagetrace run` looks at all sessions before it starts the server."""
    stale = made(base, dead)
    (stale / name).touch()
    assert session.remove_stale() == 1


# ---------------------------------------------------------------- containers that share their tmpfs


def test_a_session_of_another_container_is_not_ours_to_remove(base: Path, dead: int) -> None:
    """Its processes cannot be seen from here: what tells is the lock that its collector holds."""
    theirs = made(base, dead, namespace="pid:[1]")
    lock = session.own(theirs)
    (theirs / session.OWNER).write_text(f"{dead} pid:[1]")
    craft(theirs / f"ring-{dead}-0-0")
    age(theirs)
    assert session.remove_stale() == 0
    assert session.live() == [theirs]
    os.close(lock)
    assert session.live() == []
    assert session.remove_stale() == 1


def test_a_session_of_another_container_that_is_only_starting(base: Path, dead: int) -> None:
    theirs = made(base, dead, namespace="pid:[1]")
    assert session.remove_stale() == 0
    age(theirs)
    assert session.remove_stale() == 1


def test_processes_of_another_container_do_not_count_here(base: Path, other: int) -> None:
    """Process 1 lives in every container."""
    theirs = made(base, other, namespace="pid:[1]")
    craft(theirs / f"ring-{other}-0-0")
    age(theirs)
    assert session.remove_stale() == 1


def test_the_lock_goes_with_its_owner(base: Path) -> None:
    code = "import sys, time; from pathlib import Path; from stagetrace import session; "
    code += "lock = session.own(session.create()); print('locked', flush=True); time.sleep(600)"
    environment = {**os.environ, session.BASE_ENV: str(base)}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout
        assert process.stdout.readline() == "locked\n"
        (directory,) = session.live()
        assert session.owner(directory) == process.pid
        assert session.remove_stale() == 0
        process.send_signal(signal.SIGKILL)
        process.wait(DEADLINE_S)
    assert session.live() == []
    assert session.remove_stale() == 1


def test_a_server_does_not_inherit_the_lock(base: Path) -> None:
    lock = session.own(session.create())
    assert not os.get_inheritable(lock)
    os.close(lock)


def test_looking_does_not_disturb_who_takes_over(base: Path) -> None:
    directory = session.create()
    looking = os.open(directory / session.OWNER, os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    code = "import sys; from pathlib import Path; from stagetrace import session; session.own(Path(sys.argv[1]))"
    process = subprocess.Popen([sys.executable, "-c", code, str(directory)])
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.0)
    os.close(looking)
    assert process.wait(DEADLINE_S) == 0
