"""The writer of the rings: threads, forks, kills, and a tmpfs that is full, missing or not ours."""

from __future__ import annotations

import _thread
import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from stagetrace import marks, recorder, runtime, session
from stagetrace.marks import Mark, TextMark
from stagetrace.recorder import MAX_RINGS, PAUSED_AT, Recorder, Ring
from stagetrace.rings import set_paused
from tests.unit.conftest import Small
from tests.unit.helpers import DEADLINE_S, keys, plain_environment, python, rings, wait_until

# ---------------------------------------------------------------- no room, no directory

WRITE_INTO = """
    import logging, sys, threading
    from pathlib import Path
    logging.basicConfig(format="%(message)s")
    from stagetrace.recorder import Recorder
    recorder = Recorder(Path(sys.argv[1]))
    for _ in range(3):
        recorder.mark(1, 1)
        recorder.text(1, 1, "text")
    threads = [threading.Thread(target=recorder.mark, args=(1, 1)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(recorder.recording, recorder.paused())
"""


def assert_serving_went_on(done: subprocess.CompletedProcess[str], *reasons: str) -> None:
    assert done.returncode == 0, f"{done.returncode}: {done.stderr}"
    assert done.stdout.split() == ["False", "True"]
    (line,) = done.stderr.splitlines()
    assert "no recording" in line
    assert "serving goes on" in line
    assert any(reason in line for reason in reasons), line


def test_a_full_tmpfs_is_no_sigbus(small: Small) -> None:
    """A ring takes 2 MiB, the tmpfs has one: without asking first, the first touch of a page would be a SIGBUS."""
    code = WRITE_INTO
    if small.limit:
        code = "    import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n" + code
    done = python(code, small.directory)
    assert_serving_went_on(done, "No space left on device", "File too large")
    assert list(small.directory.iterdir()) == [], "what could not be made is taken away again"


def test_a_missing_session_directory(tmp_path: Path) -> None:
    assert_serving_went_on(python(WRITE_INTO, tmp_path / "gone"), "No such file or directory")


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_session_directory_open_to_others(directory: Path, mode: int) -> None:
    directory.chmod(mode)
    assert_serving_went_on(python(WRITE_INTO, directory), "chmod 700")
    assert list(directory.iterdir()) == []


def test_a_session_directory_that_is_a_link(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(directory)
    assert_serving_went_on(python(WRITE_INTO, tmp_path / "link"), "links are refused")


def test_no_directory_is_no_recording_and_no_word() -> None:
    silent = Recorder(None)
    silent.mark(1, 1)
    silent.text(1, 1, "text")
    assert silent.paused()
    assert not silent.recording


def test_files_are_for_their_owner_only(directory: Path) -> None:
    before = os.umask(0)
    try:
        Recorder(directory, capacity=8).mark(1, 1)
    finally:
        os.umask(before)
    (path,) = directory.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


# ---------------------------------------------------------------- threads


def test_a_ring_for_every_thread_up_to_a_limit(directory: Path) -> None:
    writer = Recorder(directory, capacity=8)
    writer.mark(1, 0)
    extra = 5
    begin, end = threading.Barrier(MAX_RINGS + extra), threading.Event()

    def write(number: int) -> None:
        writer.mark(1, number)
        writer.mark(1, number)
        begin.wait(DEADLINE_S)
        end.wait(DEADLINE_S)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(1, MAX_RINGS + extra)]
    for thread in threads:
        thread.start()
    begin.wait(DEADLINE_S)
    found = rings(directory)
    assert len(found) == MAX_RINGS
    assert sorted(len(keys(ring)) for ring in found) == [1] + [2] * (MAX_RINGS - 1)
    assert sum(ring.refused() for ring in found) == extra
    end.set()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("kind", ["threading", "foreign"])
def test_a_dead_thread_s_ring_is_used_again(directory: Path, kind: str) -> None:
    """Foreign ones, made by the engine's C++, are alive for ever as far as ``threading`` knows."""
    writer = Recorder(directory, capacity=512)
    for number in range(2 * MAX_RINGS):
        written = threading.Event()

        def write(number: int = number, written: threading.Event = written) -> None:
            threading.current_thread()  # from here on, ``threading`` knows a foreign one, too
            writer.mark(1, number)
            written.set()

        if kind == "threading":
            threading.Thread(target=write).start()
        else:
            _thread.start_new_thread(write, ())
        assert written.wait(DEADLINE_S)
        wait_until(lambda: writer._free, "the dead thread's ring is free")
    (ring,) = rings(directory)
    assert keys(ring) == list(range(2 * MAX_RINGS))
    assert ring.refused() == 0


def test_a_live_thread_s_ring_is_not_shared(directory: Path) -> None:
    writer = Recorder(directory, capacity=8)
    writer.mark(1, 1)
    thread = threading.Thread(target=writer.mark, args=(1, 2))
    thread.start()
    thread.join()
    assert sorted(keys(ring) for ring in rings(directory)) == [[1], [2]]


@pytest.mark.parametrize(
    ("name", "role"),
    [("engine-output", "engine-output"), ("x" * 100, "x" * 32), ("ä" * 31, "ä" * 16), ("\ud800", "?"), ("", "")],
)
def test_rings_say_whose_they_are(directory: Path, name: str, role: str) -> None:
    writer = Recorder(directory, capacity=8)
    thread = threading.Thread(target=writer.mark, args=(1, 1))
    thread.name = name
    thread.start()
    thread.join()
    (ring,) = rings(directory)
    assert (ring.role, ring.pid) == (role, os.getpid())
    assert ring.thread not in (0, threading.get_native_id())


def test_the_first_ring_of_a_process_is_announced_once(directory: Path) -> None:
    writer, calls = Recorder(directory, capacity=8), []
    writer.on_first_ring = lambda: calls.append(threading.current_thread().name)
    for name in ("first", "second"):
        thread = threading.Thread(target=writer.mark, args=(1, 1), name=name)
        thread.start()
        thread.join()
    assert calls == ["first"]


def test_a_signal_handler_may_write_while_its_thread_gets_its_ring(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a lock that is not re-entrant the thread would wait for itself."""
    writer = Recorder(directory, capacity=8)
    monkeypatch.setattr(recorder, "Ring", lambda *given: (signal.raise_signal(signal.SIGUSR1), Ring(*given))[1])
    handled = []

    def handler(*_: object) -> None:
        if not handled:
            handled.append(True)
            writer.mark(1, 2)

    previous = signal.signal(signal.SIGUSR1, handler)
    try:
        writer.mark(1, 1)
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert handled
    assert sorted(key for ring in rings(directory) for key in keys(ring)) == [1, 2]


# ---------------------------------------------------------------- other processes

FORK = """
    import os, sys
    from pathlib import Path
    from stagetrace import context
    from stagetrace.recorder import Recorder
    recorder = Recorder(Path(sys.argv[1]), capacity=64)
    recorder.mark(1, 1)
    numbers = [context.number() for _ in range(100)]
    ring = next(Path(sys.argv[1]).glob("ring-*"))
    before = ring.read_bytes()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        recorder.mark(1, 2)
        os.write(writer, b"".join(context.number().to_bytes(8, "little") for _ in range(100)))
        os._exit(5)
    theirs = os.read(reader, 800)
    numbers += [context.number() for _ in range(100)]
    numbers += [int.from_bytes(theirs[i : i + 8], "little") for i in range(0, 800, 8)]
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
    print(ring.read_bytes() == before, len(numbers), len(set(numbers)))
    recorder.mark(1, 3)
    print(os.getpid(), pid)
"""


def test_a_forked_child_has_a_ring_of_its_own(directory: Path) -> None:
    done = python(FORK, directory)
    assert done.returncode == 0, done.stderr
    untouched, numbers, distinct, parent, child = done.stdout.split()
    assert untouched == "True"
    assert (numbers, distinct) == ("300", "300"), "a child must not hand out its parent's numbers"
    assert {ring.pid: keys(ring) for ring in rings(directory)} == {int(parent): [1, 3], int(child): [2]}


GREET = """
    import os, sys
    from stagetrace import runtime
    from stagetrace.runtime import Integration, activate
    from stagetrace.hooks import HookGroup, HookSpec
    groups = (HookGroup("g", (), (HookSpec("json.decoder:JSONDecoder.decode", enter=lambda _: None),)),)
    activate(Integration("test", "json", (), ("0", "1"), groups, demo=lambda: None))
    import json
    if sys.argv[1] == "before":
        json.loads("1")
    if os.fork() == 0:
        json.loads("1")
        os._exit(0)
    os.wait()
"""


@pytest.mark.parametrize("when", ["before", "never"])
def test_a_forked_child_tells_of_its_hooks_too(directory: Path, when: str) -> None:
    """The engine's core may be a fork of its front end: its hooks are in place before it runs a line of ours."""
    assert python(GREET, when, **{session.ENV: str(directory)}).returncode == 0
    told = [[mark.text for mark in ring.read() if isinstance(mark, TextMark)] for ring in rings(directory)]
    assert told == [["json.decoder:JSONDecoder.decode installed"]] * (2 if when == "before" else 1)


WRITE_FOR_EVER = """
import sys
from pathlib import Path
from stagetrace.recorder import Recorder
recorder = Recorder(Path(sys.argv[1]))
number = 0
while True:
    recorder.mark(1, number, number)
    recorder.text(1, number, "t" * 100)
    number += 1
    if number % 500 == 0:
        print(number, flush=True)
"""


def test_what_a_killed_process_wrote_is_still_there(directory: Path) -> None:
    command = [sys.executable, "-c", WRITE_FOR_EVER, str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=plain_environment()) as writer:
        assert writer.stdout
        said = [int(writer.stdout.readline()) for _ in range(3)][-1]
        writer.send_signal(signal.SIGKILL)
        assert writer.wait(DEADLINE_S) == -signal.SIGKILL
    (ring,) = rings(directory)
    seen = list(ring.read(final=True))
    numbers = [mark.key for mark in seen if isinstance(mark, Mark)]
    texts = [mark for mark in seen if isinstance(mark, TextMark)]
    assert numbers == list(range(numbers[0], numbers[-1] + 1))
    assert numbers[-1] >= said - 1
    assert numbers[0] == 0 or ring.lost > 0
    assert {text.text for text in texts} == {"t" * 100}
    assert len(texts) >= len(numbers) - 1


# ---------------------------------------------------------------- pausing


def test_a_ring_that_is_made_during_a_pause_is_silent(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Recorder(directory, capacity=8)
    assert not writer.paused()
    (directory / session.PAUSED).touch()
    set_paused(directory, True)
    assert writer.paused()
    found = []
    thread = threading.Thread(target=lambda: found.append(writer.paused()))
    thread.start()
    thread.join()
    assert found == [True]


def test_a_pause_while_a_ring_is_made_is_not_missed(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`stagetrace pause` may look for rings just before this one can be seen."""

    def paused_meanwhile(*given: object) -> Ring:
        (directory / session.PAUSED).touch()
        assert set_paused(directory, True) == 0
        return Ring(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(recorder, "Ring", paused_meanwhile)
    writer = Recorder(directory, capacity=8)
    assert writer.paused()
    assert next(directory.glob("ring-*")).read_bytes()[PAUSED_AT] == 1


# ---------------------------------------------------------------- processes that are no engines

PLAIN = """
    import os, sys, threading
    from stagetrace.runtime import Integration, activate
    from stagetrace.hooks import HookGroup, HookSpec
    groups = (HookGroup("g", (), (HookSpec("json.decoder:JSONDecoder.decode", enter=lambda _: None),)),)
    integration = Integration("test", "json", (), ("0", "1"), groups, demo=lambda: None)
    activate(integration)
    activate(integration)
    import json
    children = open(f"/proc/self/task/{os.getpid()}/children").read().split()
    loaded = [name for name in ("sqlite3", "opentelemetry", "typer") if name in sys.modules]
    print(type(json.decoder.JSONDecoder.__dict__["decode"]).__name__, threading.active_count(),
          len(os.listdir("/proc/self/task")), len(children), len(loaded))
    if len(sys.argv) > 1:
        json.loads("1")
"""


def test_hooks_that_are_never_called_start_nothing(directory: Path) -> None:
    """The plug-in also runs for ``--help`` and in probes: no ring, no process, no thread."""
    done = python(PLAIN, **{session.ENV: str(directory)})
    assert done.stdout.split() == ["FunctionWrapper", "1", "1", "0", "0"], done.stderr
    assert done.stderr == ""
    assert list(directory.iterdir()) == []
    assert python(PLAIN, "call it", **{session.ENV: str(directory)}).returncode == 0
    assert len(list(directory.iterdir())) == 1, "a hook that is called makes one"


@pytest.mark.parametrize("environment", [{}, {"STAGETRACE": "0"}, {session.ENV: "", "STAGETRACE": "0"}])
def test_without_a_session_nothing_is_hooked(environment: dict[str, str]) -> None:
    done = python(PLAIN, "call it", **environment)
    assert done.stdout.split()[0] == "function", done.stderr
    assert done.stderr == ""


def test_a_refused_session_is_told_once_and_nothing_is_hooked(tmp_path: Path) -> None:
    done = python(PLAIN, "call it", **{session.ENV: str(tmp_path / "gone")})
    assert done.stdout.split()[0] == "function"
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()
    assert str(tmp_path / "gone") in line
    assert "serving goes on" in line


def test_an_engine_whose_collector_cannot_be_made_is_built_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(session.BASE_ENV, str(tmp_path / "gone"))
    monkeypatch.setattr(runtime, "recorder", Recorder(None))
    monkeypatch.setattr(runtime._state, "warned", False)
    runtime.engine_starts()
    runtime.engine_starts()
    assert [record.getMessage() for record in caplog.records if str(tmp_path / "gone") in record.getMessage()] != []
    assert len(caplog.records) == 1
    assert session.ENV not in os.environ


def test_a_collector_that_does_not_start_leaves_nothing_behind(
    base: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", str(base / "no python"))
    monkeypatch.setattr(runtime, "recorder", Recorder(None))
    monkeypatch.setattr(runtime._state, "warned", False)
    runtime.engine_starts()
    assert len(caplog.records) == 1
    assert list(base.iterdir()) == []
    assert session.ENV not in os.environ
    assert not runtime.recorder.recording


def test_marks_lie_as_their_readers_expect() -> None:
    assert marks.RECORD.size == marks.TEXT.size == marks.RECORD_SIZE == 64
