"""The command line: one line and exit code 2 for what cannot be used, no traceback for anything."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stagetrace import cli, session
from stagetrace.hooks import HookGroup, HookSpec, Installer
from stagetrace.model import RequestRecord, RunRecord, empty_stages
from stagetrace.recorder import Recorder
from stagetrace.store import StoreWriter, files
from tests.unit.helpers import DEADLINE_S, Engine, keys, plain_environment, rings

COMMANDS = ("run", "stages", "demo", "pause", "resume")
ANSI = "\x1b"


class Cli:
    """Runs commands in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capfd = capfd

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        """Exit code, stdout and stderr."""
        self._monkeypatch.setattr(sys, "argv", ["stagetrace", *arguments])
        self._capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        sys.stdout.flush()
        return int(ended.value.code or 0), *self._capfd.readouterr()

    def refused(self, *arguments: str) -> str:
        """The one line on stderr of a command that cannot be carried out."""
        code, out, err = self(*arguments)
        assert (code, out) == (2, ""), err
        (said,) = err.splitlines()
        assert said.startswith("stagetrace: ")
        return said


@pytest.fixture
def stagetrace(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Cli:
    monkeypatch.chdir(tmp_path)
    return Cli(monkeypatch, capfd)


def store(path: Path, requests: int = 2) -> Path:
    with StoreWriter(path) as writer:
        writer.write_run(RunRecord("session"))
        writer.write_requests(
            [
                RequestRecord(
                    request_id=f"chatcmpl-{number}", external_id=f"mine-{number}", trace_id=f"{number + 0xAA:032x}",
                    operation="chat", model="tiny", status="ok", finish_reason="stop", active_stage=None,
                    prompt_tokens=5, cached_tokens=0, output_tokens=2, start_unix_ns=1_700_000_000_000_000_000 + number,
                    e2e_ms=5.0, ttft_ms=2.0, ttft_kind="streamed", queue_ms=0.5, prefill_ms=1.0,
                    itl_ms={"p50": 1.0, "p95": 1.0, "p99": 1.0, "max": 1.0}, coverage=1.0, coverage_ttft=1.0,
                    unattributed_ms=0.0, preemptions=0, sequence=0, stages=empty_stages("not_reached"),
                    span_id=f"{number + 1:016x}",
                )
                for number in range(requests)
            ]
        )  # fmt: skip
    return path


# ---------------------------------------------------------------- asking for help


def test_every_command_is_known_here() -> None:
    assert {command.name or command.callback.__name__ for command in cli.app.registered_commands} >= set(COMMANDS)


@pytest.mark.parametrize("name", sorted({*COMMANDS, *(str(c.callback.__name__) for c in cli.app.registered_commands)}))
def test_help(stagetrace: Cli, name: str) -> None:
    code, out, err = stagetrace(name, "--help")
    assert (code, err) == (0, "")
    assert f"Usage: stagetrace {name}" in out
    assert ANSI not in out


def test_help_of_it_all(stagetrace: Cli) -> None:
    code, out, err = stagetrace("--help")
    assert (code, err) == (0, "")
    assert all(name in out for name in COMMANDS)
    code, out, err = stagetrace()
    assert (code, out) == (2, "")
    assert err.startswith("Usage: stagetrace")


@pytest.mark.parametrize("arguments", [("gate", "--ab", "x"), ("gate", "--colour"), ("load", "--url")])
def test_what_a_command_is_told_wrongly_is_in_its_own_help(stagetrace: Cli, arguments: tuple[str, ...]) -> None:
    assert f"(see `stagetrace {arguments[0]} --help`)" in stagetrace.refused(*arguments)


def test_fields_of_allow_are_completed() -> None:
    asked = {
        "_STAGETRACE_COMPLETE": "complete_bash",
        "COMP_WORDS": "stagetrace gate --allow max_num",
        "COMP_CWORD": "3",
    }
    done = subprocess.run(
        [sys.executable, "-c", "from stagetrace.cli import main; main()"],
        env={**os.environ, **asked}, capture_output=True, text=True, timeout=DEADLINE_S,
    )  # fmt: skip
    assert done.stdout.split() == ["max_num_batched_tokens", "max_num_seqs"]


def test_shell_completion_and_python_m() -> None:
    command = [sys.executable, "-m", "stagetrace"]
    # Named, not detected: which shell is above the tests is nobody's business.
    named = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = subprocess.run(
        [*command, "--show-completion", "bash"], env=named, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "complete" in done.stdout


# ---------------------------------------------------------------- what cannot be used


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("--wrong",), "--wrong"),
        (("nonsense",), "nonsense"),
        (("run",), "CMD"),
        (("run", "--"), "CMD"),
        (("run", "--wrong", "--", "true"), "--wrong"),
        (("run", "--store"), "--store"),
        (("run", "--store-max", "much", "--", "true"), "--store-max: not a size: 'much'"),
        (("run", "--store-max", "", "--", "true"), "--store-max: not a size"),
        (("run", "--store-max", "-5", "--", "true"), "--store-max: not a size: '-5'"),
        (("run", "--store-max", "1MiB", "--store", "gone/s.db", "--", "true"), "gone/s.db"),
        (("run", "--store-max", "5", "--", "true"), "--store-max 5 bytes is too small"),
        (("run", "--store", "s.db", "--no-store", "--", "true"), "--store s.db and --no-store"),
        (("stages", "--wrong"), "--wrong"),
        (("stages", "--last", "0"), "--last"),
        (("stages", "--last", "x"), "--last"),
        (("stages", "--request"), "--request"),
        (("stages", "a", "b"), "b"),
        (("stages", "gone.db"), "gone.db"),
        (("stages",), "stagetrace.db"),
        (("stages", "two\nlines.db"), "lines.db"),
        (("stages", "gone.db", "--json", "--markdown"), "--markdown and --json"),
        (("stages", "gone.db", "--request", "x", "--markdown"), "--markdown and --request"),
        (("stages", "\x1b[1m.db"), "\\x1b[1m.db"),
        (("stages", os.fsdecode(b"\xff.db")), "no such store: '\\xff.db'"),
        (("stages", "--request", os.fsdecode(b"\xff"), "gone.db"), "gone.db"),
        (("demo", "--model", "gone"), "gone"),
        (("demo", "--store", "gone/s.db"), "gone/s.db: no such directory"),
        (("demo", "--store", "."), "is a directory"),
        (("pause", "a", "b"), "b"),
    ],
)
def test_one_line_that_names_what_is_wrong(stagetrace: Cli, base: Path, arguments: tuple[str, ...], names: str) -> None:
    assert names in stagetrace.refused(*arguments)
    assert list(Path().iterdir()) == [Path("base")], "nothing is made or left behind"


def test_an_id_that_is_no_text_is_echoed_as_its_bytes(stagetrace: Cli) -> None:
    store(Path("s.db"))
    said = stagetrace.refused("stages", "s.db", "--request", os.fsdecode(b"a\xff\x1b"))
    assert "s.db has no request a\\xff\\x1b;" in said


def test_a_demo_that_could_not_be_stored_starts_nothing(stagetrace: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", os.getcwd())
    Path("letter").write_text("Dear reader")
    assert "letter: not a stagetrace store" in stagetrace.refused("demo", "--store", "letter")
    lock = files.WriterLock(Path("busy.db").absolute())
    assert "another stagetrace is writing it" in stagetrace.refused("demo", "--store", "busy.db")
    lock.release()
    assert [path.name for path in Path().iterdir()] == ["letter"]


@pytest.mark.parametrize("what", ["foreign", "empty", "directory", "link to nothing", "unreadable"])
@pytest.mark.parametrize("command", [("stages",), ("stages", "--json"), ("stages", "--request", "x")])
def test_stores_that_cannot_be_read(stagetrace: Cli, tmp_path: Path, what: str, command: tuple[str, ...]) -> None:
    path = tmp_path / "s.db"
    if what == "foreign":
        path.write_text("a letter\n" * 100)
    elif what == "empty":
        path.touch()
    elif what == "directory":
        path.mkdir()
    elif what == "link to nothing":
        path.symlink_to(tmp_path / "nothing")
    elif what == "unreadable":
        path = Path("/proc/self/mem").resolve()  # even root cannot read that
    assert str(path) in stagetrace.refused(command[0], str(path), *command[1:])


def test_a_locked_store(stagetrace: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = store(tmp_path / "s.db")
    monkeypatch.setattr(files, "_BUSY_SECONDS", 0.1)
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("SELECT * FROM runs").fetchall()
        db.execute("PRAGMA locking_mode=EXCLUSIVE")
        db.execute("UPDATE runs SET model = 'x'")
        db.commit()
        said = stagetrace.refused("stages", str(path))
    assert f"{path}: locked by another program" in said


@pytest.mark.parametrize("identifier", ["unknown", "", "chatcmpl", "%", "x" * 128])
def test_a_request_that_is_not_there(stagetrace: Cli, tmp_path: Path, identifier: str) -> None:
    path = store(tmp_path / "s.db")
    said = stagetrace.refused("stages", str(path), "--request", identifier)
    assert f"{path} has no request" in said
    assert "--json" in said


@pytest.mark.parametrize("identifier", ["x" * 129, "gr\u00f6\u00dfe", "two\nlines", "\udcff"])
def test_an_id_that_no_request_can_have_here(stagetrace: Cli, tmp_path: Path, identifier: str) -> None:
    path = store(tmp_path / "s.db")
    said = stagetrace.refused("stages", str(path), "--request", identifier)
    assert f"{path} has no request" in said
    assert said.endswith("up to 128 printable ASCII characters: look for the trace id")


# ---------------------------------------------------------------- what can


@pytest.mark.parametrize("identifier", ["chatcmpl-1", "mine-1", f"{0xAB:032x}", f"{0xAB:032X}"])
def test_a_request_by_any_of_its_ids(stagetrace: Cli, tmp_path: Path, identifier: str) -> None:
    path = store(tmp_path / "s.db")
    code, out, err = stagetrace("stages", str(path), "--request", identifier, "--json")
    assert (code, err) == (0, "")
    assert [request["request_id"] for request in json.loads(out)["requests"]] == ["chatcmpl-1"]


def test_the_newest_requests(stagetrace: Cli, tmp_path: Path) -> None:
    path = store(tmp_path / "s.db", requests=5)
    for arguments, shown in (((), {2, 3, 4}), (("--last", "1"), {4}), (("--last", "9"), {0, 1, 2, 3, 4})):
        code, out, err = stagetrace("stages", str(path), *arguments)
        assert (code, err) == (0, "")
        assert {number for number in range(5) if f"chatcmpl-{number}" in out} == shown


def buffered() -> dict[str, str]:
    """An environment in which output that nobody flushed is written at the very end."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


@pytest.mark.parametrize("arguments", [("--json",), ("--last", "500"), ("--markdown",)])
@pytest.mark.parametrize("requests", [1, 200])
def test_whoever_reads_has_enough(tmp_path: Path, arguments: tuple[str, ...], requests: int) -> None:
    path = store(tmp_path / "s.db", requests)
    command = [sys.executable, "-m", "stagetrace", "stages", str(path), *arguments]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=buffered(), timeout=DEADLINE_S)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.parametrize("arguments", [("--json",), ("--last", "500"), ("--markdown",)])
@pytest.mark.parametrize("requests", [1, 200])
def test_a_full_disk_is_said(tmp_path: Path, arguments: tuple[str, ...], requests: int) -> None:
    path = store(tmp_path / "s.db", requests)
    command = [sys.executable, "-m", "stagetrace", "stages", str(path), *arguments]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=buffered(), timeout=DEADLINE_S)
    assert done.returncode == 2
    assert done.stderr == b"stagetrace: stdout: No space left on device; write it elsewhere\n"


def test_ctrl_c_and_our_own_faults(stagetrace: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(error: BaseException) -> Callable[..., None]:
        def app(**_: object) -> None:
            raise error

        return app

    monkeypatch.setattr(cli, "app", raises(KeyboardInterrupt()))
    assert stagetrace("stages") == (130, "", "")
    monkeypatch.setattr(cli, "app", raises(ZeroDivisionError()))
    monkeypatch.setattr(sys, "argv", ["stagetrace"])
    with pytest.raises(ZeroDivisionError):
        cli.main()


def test_a_name_that_cannot_be_printed(tmp_path: Path) -> None:
    """Whatever the locale."""
    for encoding in ("utf-8", "ascii"):
        environment = {**plain_environment(), "PYTHONIOENCODING": encoding, "LC_ALL": "C"}
        command = [sys.executable, "-m", "stagetrace", "stages", "g\u00f6ne\udcff\n.db"]
        done = subprocess.run(command, env=environment, capture_output=True, timeout=DEADLINE_S)
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1
        assert done.stderr.startswith(b"stagetrace: ")


# ---------------------------------------------------------------- pause and resume


@pytest.fixture
def owned(base: Path) -> Iterator[Callable[[], Path]]:
    """Makes sessions that are collected, as far as anybody can see."""
    locks = []

    def make() -> Path:
        directory = session.create()
        locks.append(session.own(directory))
        return directory

    yield make
    for lock in locks:
        os.close(lock)


def test_nothing_to_pause(stagetrace: Cli, base: Path) -> None:
    for command in ("pause", "resume"):
        assert "none is running here" in stagetrace.refused(command)
        said = stagetrace.refused(command, "stagetrace-0-x")
        assert "no session stagetrace-0-x" in said


def test_one_of_several_must_be_named(stagetrace: Cli, owned: Callable[[], Path]) -> None:
    first, second = owned(), owned()
    said = stagetrace.refused("pause")
    assert first.name in said
    assert second.name in said
    assert stagetrace("pause", second.name)[0] == 0
    assert not (first / session.PAUSED).exists()
    assert stagetrace("pause", str(first))[0] == 0
    assert (first / session.PAUSED).exists()
    assert "no session nobody" in stagetrace.refused("pause", "nobody")


def test_pause_and_resume_reach_every_ring(
    stagetrace: Cli, owned: Callable[[], Path], engine: Callable[..., Engine]
) -> None:
    """Those that are there, those that are made meanwhile, and through hooks that are in place."""
    directory = owned()
    recorder = Recorder(directory)
    made = engine(core="class Scheduler:\n    def schedule(self, number): return number")
    spec = HookSpec(
        made.target("core:Scheduler.schedule"), enter=lambda _, number: recorder.mark(99, number), takes=("number",)
    )
    installer = Installer([HookGroup("g", (), (spec,))], recorder.paused, lambda *_: None)
    installer.install()
    scheduler = made.load("core").Scheduler()

    def elsewhere(number: int) -> None:
        thread = threading.Thread(target=scheduler.schedule, args=(number,))
        thread.start()
        thread.join()

    try:
        assert scheduler.schedule(1) == 1
        code, out, err = stagetrace("pause")
        assert (code, err) == (0, "")
        assert out.startswith(f"paused {directory.name} (1 recording threads; pid {os.getpid()}: ")
        assert stagetrace("pause")[0] == 0, "twice is no fault"
        assert scheduler.schedule(2) == 2
        elsewhere(3)
        code, out, err = stagetrace("resume")
        assert (code, err) == (0, "")
        assert out.startswith(f"resumed {directory.name} (2 recording threads; pid {os.getpid()}: ")
        assert scheduler.schedule(4) == 4
        elsewhere(5)
    finally:
        installer.uninstall()
    assert sorted(key for ring in rings(directory) for key in keys(ring)) == [1, 4, 5]


def test_a_pause_that_cannot_be_written(stagetrace: Cli, owned: Callable[[], Path]) -> None:
    directory = owned()
    (directory / session.PAUSED).mkdir()
    said = stagetrace.refused("resume")
    assert str(directory) in said
