"""``stagetrace run``: for the server, and for whoever waits for it, as if it were not there."""

from __future__ import annotations

import contextlib
import os
import pty
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stagetrace import load, session
from tests.unit.conftest import Small
from tests.unit.helpers import DEADLINE_S, ended, line, wait_until

RUN = [sys.executable, "-m", "stagetrace", "run"]
PYTHON = [sys.executable, "-c"]
Done = subprocess.CompletedProcess[bytes]


def run(*command: str, before: tuple[str, ...] = ("--no-store",), **options: Any) -> Done:
    return subprocess.run([*RUN, *before, "--", *command], capture_output=True, timeout=DEADLINE_S, **options)


@contextlib.contextmanager
def running(code: str, *arguments: str, before: tuple[str, ...] = ("--no-store",)) -> Iterator[subprocess.Popen[str]]:
    """A Python program under ``stagetrace run`` that has said ``ready``."""
    command = [*RUN, *before, "--", *PYTHON, code, *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with ended(process):
        assert line(process) == "ready"
        yield process


#: Counts the signals it gets and says so; SIGUSR2 makes it say how many of each, and end.
COUNT = """
import collections, signal, sys, time
counts = collections.Counter()

def count(number, _):
    counts[signal.Signals(number).name] += 1
    print("got", signal.Signals(number).name, flush=True)

def tell(*_):
    print(*[f"{name}={counts[name]}" for name in sorted(counts)], flush=True)
    sys.exit(4)

for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGQUIT, signal.SIGWINCH):
    signal.signal(number, count)
signal.signal(signal.SIGUSR2, tell)
print("ready", flush=True)
while True:
    time.sleep(0.01)
"""


@pytest.fixture(autouse=True)
def sessions(base: Path) -> Iterator[Path]:
    """Whatever happens, no session is left where this test's sessions are made."""
    yield base
    assert list(base.iterdir()) == []


# ---------------------------------------------------------------- exit codes


@pytest.mark.parametrize("code", [0, 7, 127, 255])
def test_the_exit_code_is_the_command_s(code: int) -> None:
    done = run("sh", "-c", f"exit {code}")
    assert (done.returncode, done.stdout, done.stderr) == (code, b"", b"")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_command_that_a_signal_ends(number: signal.Signals) -> None:
    assert run("sh", "-c", f"ulimit -c 0; kill -{int(number)} $$").returncode == 128 + number


def test_a_command_that_cannot_be_run(tmp_path: Path) -> None:
    (tmp_path / "no program").write_text("text")
    (tmp_path / "no program").chmod(0o644)
    (tmp_path / "bad format").write_bytes(b"\x7fELF")
    (tmp_path / "bad format").chmod(0o755)
    codes = {"a-command-nobody-has": 127, "": 127, str(tmp_path / "gone"): 127}
    codes |= {str(tmp_path / "no program"): 126, str(tmp_path / "bad format"): 126, str(tmp_path): 126}
    for command, code in codes.items():
        done = run(command)
        assert (done.returncode, done.stdout) == (code, b"")
        (said,) = done.stderr.decode().splitlines()
        assert f"cannot run {command}: " in said


def test_the_command_s_arguments_are_its_own() -> None:
    arguments = ["--store", "-x", "--", "", "a b", "--help", "ä", "\udcff"]
    done = run("printf", "%s|", *arguments)
    assert done.stdout == "".join(f"{each}|" for each in arguments).encode("utf-8", "surrogateescape")


@pytest.mark.parametrize("ignored", [signal.SIGCHLD, signal.SIGPIPE])
def test_whoever_starts_it_may_ignore_signals(ignored: signal.Signals) -> None:
    """Where SIGCHLD is ignored, the system reaps children by itself and keeps their exit codes."""
    done = subprocess.run(
        [*RUN, "--no-store", "--", "sh", "-c", "exit 7"],
        preexec_fn=lambda: signal.signal(ignored, signal.SIG_IGN), timeout=DEADLINE_S,
    )  # fmt: skip
    assert done.returncode == 7


# ---------------------------------------------------------------- what the command inherits


def test_standard_streams_are_the_command_s() -> None:
    data = os.urandom(1 << 20)
    done = run("sh", "-c", "tee /dev/stderr", input=data)
    assert (done.returncode, done.stdout, done.stderr) == (0, data, data)


def test_a_closed_stream_is_closed() -> None:
    served = ["sh", "-c", "ls /proc/self/fd; cat; echo lost >&2; exit 3"]
    command = ["sh", "-c", 'exec "$@" <&- 2>&-', "sh", *RUN, "--no-store", "--", *served]
    done = subprocess.run(command, capture_output=True, timeout=DEADLINE_S)
    assert done.returncode == 3
    # `ls` itself opens the directory, as the lowest number that is free.
    assert done.stdout.split() == [b"0", b"1"]


def test_signals_are_as_without_us() -> None:
    """None blocked, and none ignored that Python ignores for itself: a server's ``yes | head`` would complain."""
    show = ["grep", "-E", "^Sig(Blk|Ign)", "/proc/self/status"]

    def masks(shown: bytes) -> list[int]:
        # The C library keeps two real-time signals for itself.
        return [int(mask, 16) & 0x7FFFFFFF for mask in shown.split()[1::2]]

    blocked, ignored = masks(run(*show).stdout)
    # Whoever runs the tests may ignore signals of his own, as `nohup` does.
    assert [blocked, ignored] == masks(subprocess.run(show, capture_output=True).stdout)
    assert blocked == 0 and not ignored & (1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1)


def test_files_are_not_left_open_for_it(tmp_path: Path) -> None:
    store = ("--store", str(tmp_path / "s.db"))
    count = ["sh", "-c", "ls /proc/self/fd | wc -l"]
    assert run(*count, before=store).stdout == subprocess.run(count, capture_output=True).stdout


def test_the_session_is_named_to_it_and_gone_afterwards(base: Path) -> None:
    code = "import os; d = os.environ['STAGETRACE_SESSION']; print(d, oct(os.stat(d).st_mode & 0o7777))"
    directory, mode = run(*PYTHON, code).stdout.decode().split()
    assert Path(directory).parent == base
    assert mode == "0o700"
    assert not Path(directory).exists()


# ---------------------------------------------------------------- signals


def test_every_signal_is_passed_on_once() -> None:
    names = ["SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGWINCH"]
    with running(COUNT) as process:
        for name in names:
            process.send_signal(signal.Signals[name])
            assert line(process) == f"got {name}"
        process.send_signal(signal.SIGUSR2)
        assert line(process) == " ".join(f"{name}=1" for name in names)
        assert process.wait(DEADLINE_S) == 4


def test_a_command_that_does_not_care_is_ended_by_the_signal() -> None:
    with running("import time; print('ready', flush=True); time.sleep(600)") as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 128 + signal.SIGTERM


class Terminal:
    """A session of its own with a terminal, in which ``stagetrace run`` runs, started by ``shell`` if given."""

    def __init__(self, command: list[str]) -> None:
        self.pid, self.end = pty.fork()
        if self.pid == 0:
            try:
                os.execvp(command[0], command)
            finally:
                os._exit(99)
        self.text = ""

    def expect(self, text: str) -> None:
        def seen() -> bool:
            if text not in self.text:
                self.text += os.read(self.end, 1000).decode()
            return text in self.text

        wait_until(seen, f"the terminal shows {text}")

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def hang_up(self) -> None:
        os.close(self.end)
        self.end = -1

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.end)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


@contextlib.contextmanager
def terminal(*command: str) -> Iterator[Terminal]:
    made = Terminal([*command])
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize(("key", "name"), [(b"\x03", "SIGINT"), (b"\x1c", "SIGQUIT")])
def test_a_key_is_not_doubled(key: bytes, name: str) -> None:
    """The terminal has sent the signal to the server as well; passed on, it would mean a second Ctrl-C."""
    with terminal(*RUN, "--no-store", "--", *PYTHON, COUNT) as tty:
        tty.expect("ready")
        os.write(tty.end, key)
        tty.expect(f"got {name}")
        # After it in line, should it come again: the lower number is taken first.
        os.kill(tty.pid, signal.SIGUSR2)
        tty.expect(f"{name}=1")
        assert tty.wait() == 4


def test_a_key_reaches_a_command_that_left_the_group() -> None:
    code = "import os; os.setpgid(0, 0)\n" + COUNT
    with terminal(*RUN, "--no-store", "--", *PYTHON, code) as tty:
        tty.expect("ready")
        os.write(tty.end, b"\x03")
        # What it says from the background is shown all the same.
        tty.expect("got SIGINT")
        os.kill(tty.pid, signal.SIGUSR2)
        tty.expect("SIGINT=1")
        assert tty.wait() == 4


def test_a_line_that_goes_dead_is_told_to_the_command(tmp_path: Path) -> None:
    """Only the session's leader, which is us here (``docker run -t``, ``ssh host stagetrace run``), is sent SIGHUP."""
    code = """
import pathlib, signal, sys, time
def gone(*_):
    pathlib.Path(sys.argv[1], "told").touch()
    sys.exit(3)
signal.signal(signal.SIGHUP, gone)
pathlib.Path(sys.argv[1], "ready").touch()  # not through the terminal, which is about to fail
time.sleep(600)
"""
    with terminal(*RUN, "--no-store", "--", *PYTHON, code, str(tmp_path)) as tty:
        wait_until((tmp_path / "ready").exists, "the command runs")
        tty.hang_up()
        assert tty.wait() == 3
    assert (tmp_path / "told").exists()


# ---------------------------------------------------------------- other people's children

#: A child leaves a child behind, which ends a little later. Somebody must reap that.
ORPHANS = """
import os, pathlib, time
reader, writer = os.pipe()
if os.fork() == 0:
    parent = os.getpid()
    if os.fork() == 0:
        while os.getppid() == parent:
            time.sleep(0.01)
        os.write(writer, f"{os.getpid()} {os.getppid()}".encode())
    os._exit(0)
os.wait()
orphan, parent = os.read(reader, 50).decode().split()
assert int(parent) == os.getppid(), "it has become the supervisor's, not process 1's"
orphan = pathlib.Path("/proc", orphan)
until = time.monotonic() + 50
while orphan.exists() and time.monotonic() < until:
    time.sleep(0.01)
print("a zombie" if orphan.exists() else "gone")
"""


def test_orphans_are_reaped() -> None:
    done = run(*PYTHON, ORPHANS)
    assert (done.stdout, done.returncode) == (b"gone\n", 0), done.stderr


needs_namespaces = pytest.mark.skipif(
    not shutil.which("unshare") or os.getuid() != 0, reason="only root can make process 1"
)
AS_1 = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]


@needs_namespaces
def test_right_as_process_1() -> None:
    done = subprocess.run([*AS_1, *RUN, "--no-store", "--", *PYTHON, ORPHANS], capture_output=True, timeout=DEADLINE_S)
    assert (done.stdout, done.returncode) == (b"gone\n", 0), done.stderr
    done = subprocess.run([*AS_1, *RUN, "--no-store", "--", "sh", "-c", "echo $PPID; exit 7"], capture_output=True)
    assert (done.stdout, done.returncode) == (b"1\n", 7), done.stderr


@needs_namespaces
def test_process_1_is_sent_signals_too() -> None:
    """The system keeps from process 1 every signal that it does not wait for."""
    command = [*AS_1, *RUN, "--no-store", "--", *PYTHON, "import os; print(os.getppid(), flush=True)\n" + COUNT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert (line(process), line(process)) == ("1", "ready")
        (first,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(first), signal.SIGTERM)
        assert line(process) == "got SIGTERM"
        os.kill(int(first), signal.SIGUSR2)
        assert line(process) == "SIGTERM=1"
        assert process.wait(DEADLINE_S) == 4


# ---------------------------------------------------------------- nothing of ours stops it


@pytest.mark.parametrize("place", ["missing", "a file", "full"])
def test_no_place_for_a_session(tmp_path: Path, small: Small, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    (tmp_path / "a file").touch()
    small.fill()
    where = small.directory if place == "full" else tmp_path / place
    monkeypatch.setenv(session.BASE_ENV, str(where))
    # Where no tmpfs can be mounted, no file of these processes may hold a single byte.
    limit = (lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))) if place == "full" and small.limit else None
    monkeypatch.setenv(session.ENV, "/a session around this one")
    done = run("sh", "-c", 'echo "served${STAGETRACE_SESSION}"; exit 7', preexec_fn=limit)
    assert (done.returncode, done.stdout) == (7, b"served\n")
    (said,) = done.stderr.decode().splitlines()
    assert f"no session under {where}: " in said
    assert "serving goes on without recording" in said


BROKEN = """
import sys
from stagetrace import supervise
from stagetrace.collect.loop import Collector

def broken(self, *_):
    raise {error}

Collector.{method} = broken
sys.exit(supervise.run(["sh", "-c", "sleep 0.2; echo served; exit 7"], None, 1 << 30))
"""


@pytest.mark.parametrize(
    ("method", "error"),
    [("poll", "ZeroDivisionError('ours')"), ("poll", "MemoryError()"), ("close", "OSError(28, 'full')")],
)
def test_a_fault_of_ours_costs_the_recording_only(method: str, error: str) -> None:
    done = subprocess.run([*PYTHON, BROKEN.format(method=method, error=error)], capture_output=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stdout) == (7, b"served\n"), done.stderr
    (said,) = done.stderr.decode().splitlines()
    assert error.partition("(")[0] in said


def test_nobody_reads_our_errors(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [*RUN, "--no-store", "--", "sh", "-c", "exit 7"]
    environment = {**os.environ, session.BASE_ENV: str(tmp_path / "missing")}  # so that there is something to say
    done = subprocess.run(command, stderr=writer, env=environment, timeout=DEADLINE_S)
    os.close(writer)
    assert done.returncode == 7


# ---------------------------------------------------------------- the store

#: Records as many calls as it is told, a few stages of each, then says so and ends with 5.
SERVE = """
import os, sys, time
from pathlib import Path
from stagetrace import marks
from stagetrace.context import new_root
from stagetrace.recorder import Recorder
recorder = Recorder(Path(os.environ["STAGETRACE_SESSION"]))
for number in range(int(sys.argv[1])):
    root = new_root()
    recorder.mark(marks.ROOT, root.number, root.trace_high >> 1, root.trace_low >> 1, 1)
    recorder.text(marks.CLIENT_ID, root.number, f"client-{number}-" + "x" * 200)
    recorder.mark(marks.HANDLER, root.number, 10, 0, 1, 5)
    recorder.mark(marks.END, root.number)
    if number % 500 == 0:
        time.sleep(0.3)
print("served", flush=True)
sys.exit(5)
"""


def test_what_was_recorded_is_in_the_store(tmp_path: Path) -> None:
    store = tmp_path / "s.db"
    done = run(*PYTHON, SERVE, "20", before=("--store", str(store)))
    assert (done.returncode, done.stdout) == (5, b"served\n")
    began, said = done.stderr.decode().splitlines()
    assert began.startswith("stagetrace: recording (session stagetrace-")
    assert said.startswith(f"stagetrace: 20 requests recorded in {store}")
    found = {(request.external_id or "").partition("x")[0] for request in load(store).requests}
    assert found == {f"client-{number}-" for number in range(20)}


def test_without_a_store_nothing_is_written(tmp_path: Path) -> None:
    done = run(*PYTHON, SERVE, "20", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (5, b"served\n")
    assert done.stderr.count(b"\n") == 1 and b"recording (session" in done.stderr
    assert list(tmp_path.glob("*.db*")) == []


@pytest.mark.parametrize("what", ["foreign", "directory", "no directory", "too small", "locked"])
def test_a_store_that_is_refused_is_refused_before_anything_starts(tmp_path: Path, what: str) -> None:
    store, more = tmp_path / "s.db", ()
    if what == "foreign":
        store.write_text("a letter")
    elif what == "directory":
        store.mkdir()
    elif what == "no directory":
        store = tmp_path / "gone" / "s.db"
    elif what == "too small":
        more = ("--store-max", "10")
    holder = contextlib.nullcontext()
    if what == "locked":
        holder = running("import time; print('ready', flush=True); time.sleep(600)", before=("--store", str(store)))
    with holder as process:
        done = run("touch", str(tmp_path / "started"), before=("--store", str(store), *more))
        if process:
            process.terminate()
            process.wait(DEADLINE_S)
    assert (done.returncode, done.stdout) == (2, b"")
    (said,) = done.stderr.decode().splitlines()
    assert str(store) in said
    assert not (tmp_path / "started").exists()
    if what == "foreign":
        assert store.read_text() == "a letter"
        assert [path.name for path in tmp_path.glob("s.db*")] == ["s.db"]


#: Records one call, says so, and another one when it is told to go on.
TWICE = """
import os, sys
from pathlib import Path
from stagetrace import marks
from stagetrace.context import new_root
from stagetrace.recorder import Recorder
recorder = Recorder(Path(os.environ["STAGETRACE_SESSION"]))
for word in "ready", "done":
    root = new_root()
    recorder.mark(marks.ROOT, root.number, root.trace_high >> 1, root.trace_low >> 1, 1)
    recorder.mark(marks.END, root.number)
    print(word, flush=True)
    sys.stdin.readline()
"""


def test_a_store_that_is_removed_while_it_serves(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "s.db"
    with running(TWICE, before=("--store", str(store))) as process:
        wait_until(lambda: len(load(store).requests) == 1, "the first call is stored")
        (first,) = load(store).requests
        store.unlink()
        assert process.stdin
        print(file=process.stdin, flush=True)
        assert line(process) == "done"
        process.stdin.close()
        assert process.wait(DEADLINE_S) == 0
    (second,) = load(store).requests
    assert second.trace_id != first.trace_id
    said = [line for line in capfd.readouterr().err.splitlines() if "was removed" in line]
    assert len(said) == 1 and said[0].startswith(f"stagetrace: store {store} was removed, moved or replaced")
    assert [path.name for path in tmp_path.glob("s.db*")] == ["s.db"]


def test_a_disk_that_fills_up(small: Small) -> None:
    """Said once; the server serves on, and its exit code is still the answer."""
    limit = None
    if small.limit:
        # More than a ring takes, less than the requests do.
        limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, 3 << 20))  # noqa: E731
    count = "1000" if not small.limit else "3000"
    done = run(*PYTHON, SERVE, count, before=("--store", str(small.directory / "s.db")), preexec_fn=limit)
    assert (done.returncode, done.stdout) == (5, b"served\n"), done.stderr
    _began, ended, lost = done.stderr.decode().splitlines()
    assert "serving goes on, storing has ended" in ended
    assert "s.db" in ended
    assert "requests could not be stored" in lost


# ---------------------------------------------------------------- when we are killed ourselves

OUTLIVES = """
import os, sys, time
from pathlib import Path
from stagetrace.recorder import Recorder
recorder = Recorder(Path(os.environ["STAGETRACE_SESSION"]), capacity=64)
recorder.mark(1, 1)
parent = os.getppid()
print("ready", flush=True)  # after which the parent may be gone
while os.getppid() == parent:
    time.sleep(0.01)
recorder.mark(1, 2)
print("alone", os.environ["STAGETRACE_SESSION"], os.getpid(), flush=True)
sys.stdin.readline()
"""


def test_a_killed_supervisor_leaves_the_server_running(base: Path) -> None:
    with running(OUTLIVES) as process:
        process.send_signal(signal.SIGKILL)
        said, directory, server = line(process).split()
        assert said == "alone"
        assert run("true").returncode == 0
        assert Path(directory).is_dir(), "a session that is still written is not stale"
        assert process.stdin
        process.stdin.close()
        wait_until(lambda: not session.alive(int(server)), "the server has ended")
        assert run("true").returncode == 0
        assert not Path(directory).exists()


def test_children_that_outlive_the_server_are_waited_for(tmp_path: Path) -> None:
    """An engine core may take a moment longer than its front end, and still has something to say."""
    code = f"""
import os
from pathlib import Path
from stagetrace.recorder import Recorder
child = os.fork()
recorder = Recorder(Path(os.environ["STAGETRACE_SESSION"]))
recorder.mark(99, 1)
while child:  # until the child has written, too
    if len(list(recorder.directory.glob("ring-*"))) == 2:
        os._exit(6)
import time
time.sleep(0.3)
{SERVE}"""
    store = tmp_path / "s.db"
    done = run(*PYTHON, code, "3", before=("--store", str(store)))
    assert (done.returncode, done.stdout) == (6, b"served\n"), done.stderr
    assert len(load(store).requests) == 3


def test_switched_off_means_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGETRACE", "0")
    done = run("sh", "-c", "exit 4", before=("--store", str(tmp_path / "s.db")))
    assert (done.returncode, done.stderr) == (4, b"stagetrace: STAGETRACE=0: nothing is recorded\n")
    assert list(tmp_path.glob("s.db*")) == []


@pytest.mark.parametrize("code", [0, 3])
def test_a_command_in_which_nothing_was_recorded_does_not_end_without_a_word(code: int, tmp_path: Path) -> None:
    done = run("sh", "-c", f"exit {code}", before=("--store", str(tmp_path / "s.db")))
    assert (done.returncode, done.stdout) == (code, b"")
    assert done.stderr.decode() == (
        f"stagetrace: no engine recorded (the command ended with {code}); if it was to start one, "
        "`stagetrace doctor` says what is missing\n"
    )


def test_a_command_that_is_not_there_leaves_no_store(tmp_path: Path) -> None:
    done = run("no-such-command", before=("--store", str(tmp_path / "s.db")))
    assert done.returncode == 127
    assert list(tmp_path.glob("s.db*")) == []
