"""The collector: what it reads, when it lets go, and what it says of writers that are gone."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stagetrace import api, load, marks, runtime, session
from stagetrace.collect.loop import Collector
from stagetrace.collect.sink import NoStore, StoreSink, say
from stagetrace.collect.sinks import Guarded
from stagetrace.context import Root, new_root
from stagetrace.model import RequestRecord, RunRecord, StepRecord
from stagetrace.recorder import Recorder
from stagetrace.store import StoreError, StoreWriter
from tests.unit.helpers import (
    DEADLINE_S,
    bad_pack,
    craft,
    header,
    plain_environment,
    python,
    record,
    rings,
    wait_until,
)


class Sink:
    """Keeps what it is handed, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.records: list[RequestRecord] = []
        self.runs: list[RunRecord] = []

    def run(self, run: RunRecord) -> None:
        self.events.append("run")
        self.runs.append(run)

    def requests(self, records: list[RequestRecord]) -> None:
        self.events.append("requests")
        self.records += records

    def steps(self, records: list[StepRecord]) -> None:
        self.events.append("steps")

    def flush(self) -> None:
        self.events.append("flush")


def call(recorder: Recorder, ends: bool = True) -> Root:
    """Record a call of a client that never reached an engine."""
    root = new_root()
    recorder.mark(marks.ROOT, root.number, 1, 2, 1)
    if ends:
        recorder.mark(marks.END, root.number)
    return root


def until(collector: Collector, condition: Callable[[], object], what: str) -> None:
    def polled() -> object:
        collector.poll()
        return condition()

    wait_until(polled, what)


# ---------------------------------------------------------------- records


def test_a_record_for_every_call_after_a_run_to_put_it_in(directory: Path) -> None:
    """Also without a word from an engine core: one that died while it started, or lives elsewhere."""
    recorder, sink = Recorder(directory), Sink()
    collector = Collector(directory, [sink])
    collector.poll()
    assert sink.runs == [], "nothing yet to say whose it is"
    for _ in range(3):
        call(recorder)
    until(collector, lambda: len(sink.records) >= 3, "three records")
    assert sink.events.index("run") < sink.events.index("requests")
    assert [run.session for run in sink.runs] == [directory.name]
    collector.close()
    assert (collector.requests, len(sink.records), len(sink.runs)) == (3, 3, 1)


@pytest.mark.parametrize(
    ("value", "expected"),
    [("4", 4), ("-1", -1), ("--5", "--5"), ("²", "²"), ("٣", "٣"), ("9" * 400, "9" * 400), ("", ""), ("a=b", "a=b")],
)
def test_settings_are_what_they_look_like(directory: Path, value: str, expected: object) -> None:
    recorder, sink = Recorder(directory), Sink()
    collector = Collector(directory, [sink])
    for key in ("max_num_seqs", "model", "engine"):
        recorder.text(marks.ENGINE, 0, f"{key}={value}")
    collector.poll()
    (run,) = sink.runs
    assert {key: said for key, said in run.config.items() if key != "floor_missing"} == {"max_num_seqs": expected}
    assert run.model == (value or None)
    assert run.engine == value


def test_a_killed_writer_s_calls_are_recorded_and_its_rings_removed(directory: Path) -> None:
    """Tmpfs is memory: processes that come and go must not use it up."""
    code = """
import os, signal, sys
from pathlib import Path
from stagetrace import marks
from stagetrace.recorder import Recorder
recorder = Recorder(Path(sys.argv[1]))
for number in range(1, 6):
    recorder.mark(marks.ROOT, number, number, number, 1)
os.kill(os.getpid(), signal.SIGKILL)
"""
    process = subprocess.Popen([sys.executable, "-c", code, str(directory)])
    process.wait(DEADLINE_S)
    sink = Sink()
    collector = Collector(directory, [sink])
    until(collector, lambda: collector.requests == 5, "five dead calls")
    assert collector.writers() == set()
    assert {record.status for record in sink.records} == {"error"}
    assert list(directory.iterdir()) == []
    assert collector.rings == {}
    collector.close()
    assert collector.requests == 5


def test_a_dead_writer_s_rings_count_what_they_lost(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    craft(directory / f"ring-{dead.pid}-0-0")
    (directory / f"ring-{dead.pid}-0-0").write_bytes(
        header(pid=dead.pid) + b"".join(record(n) for n in (8, 9, 10, 11, 12, 13, 14, 7))
    )
    live = Recorder(directory, capacity=8)
    for number in range(20):
        live.mark(99, number)
    collector = Collector(directory, [])
    until(collector, lambda: len(collector.rings) == 1, "the dead writer's ring is put away")
    lost = collector.lost()
    assert lost > 20 - 8
    collector.close()
    assert collector.lost() == lost
    assert [f"{lost} marks were lost" in each.getMessage() for each in caplog.records] == [True]


def test_a_process_number_that_is_given_out_again(directory: Path) -> None:
    """Its new owner is alive, and its calls are not over."""
    sink, live = Sink(), os.getpid()
    collector = Collector(directory, [sink])
    collector._dead.add(live)
    collector.assembler.anchors[live] = (1, 1)
    call(Recorder(directory), ends=False)
    collector.poll()
    assert collector._alive(live)
    assert collector.assembler.anchors[live] != (1, 1)


def test_a_mark_that_could_not_be_written_is_counted_and_costs_no_call(directory: Path) -> None:
    recorder, sink = Recorder(directory), Sink()
    collector = Collector(directory, [sink])
    bad_pack(lambda: recorder.mark(marks.ROOT, -1))
    call(recorder)
    until(collector, lambda: sink.records, "the call behind the gap")
    assert collector.lost() == 1


def test_foreign_files_in_the_session_are_passed_over(directory: Path) -> None:
    for name, content in (("ring-1-0-0", b""), ("ring-x", b"text"), ("ring-1-1-1", header(capacity=16))):
        (directory / name).write_bytes(content)
    os.mkfifo(directory / "ring-1-2-2")
    (directory / "ring-1-3-3").symlink_to("/dev/zero")
    (directory / session.FLUSH).write_text("no number")
    recorder, sink = Recorder(directory), Sink()
    call(recorder)
    collector = Collector(directory, [sink])
    until(collector, lambda: sink.records, "the call in the one ring that is ours")
    assert len(collector.rings) == 1
    collector.close()


def test_too_many_threads_are_said_at_the_end(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(directory)
    call(recorder)
    for _ in range(3):
        recorder._refuse()
    collector = Collector(directory, [])
    collector.close()
    assert (collector.lost(), collector.refused()) == (0, 3)
    assert ["3 threads were not recorded" in each.getMessage() for each in caplog.records] == [True]


def test_a_collector_lets_go_of_its_files(directory: Path) -> None:
    recorder = Recorder(directory)
    call(recorder)
    gc.collect()  # what other tests have left must not be closed in between
    before = len(os.listdir("/proc/self/fd"))
    collector = Collector(directory, [])
    collector.poll()
    assert len(os.listdir("/proc/self/fd")) == before + 1
    collector.close()
    assert len(os.listdir("/proc/self/fd")) == before


# ---------------------------------------------------------------- flush


def test_flush_waits_for_what_was_recorded_before_it(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rings are read after the request for it was, or a call could fall between the two."""
    recorder, sink = Recorder(directory), Sink()
    collector = Collector(directory, [sink])
    real = collector._discover

    def late() -> None:
        """A call ends, and `flush` is called, while the collector is between two rings."""
        real()
        if not (directory / session.FLUSH).exists():
            for ring in collector.rings.values():
                collector._read(ring)
            call(recorder)
            session.write(directory / session.FLUSH, str(time.monotonic_ns()))

    call(recorder, ends=False)
    monkeypatch.setattr(collector, "_discover", late)
    monkeypatch.setattr(collector, "_read", lambda ring, final=False: 0)
    collector.poll()
    monkeypatch.undo()
    assert not (directory / session.FLUSHED).exists()
    until(collector, (directory / session.FLUSHED).exists, "the answer")
    assert len([record for record in sink.records if record.status != "in_flight"]) == 1
    assert sink.events[-1] == "flush"


def test_flush_is_answered_once_and_a_full_tmpfs_is_no_reason_to_stop(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector = Collector(directory, [])
    session.write(directory / session.FLUSH, "5")
    collector.poll()
    assert (directory / session.FLUSHED).read_text() == "5"
    (directory / session.FLUSHED).unlink()
    collector.poll()
    assert not (directory / session.FLUSHED).exists()
    session.write(directory / session.FLUSH, "6")
    (directory / session.FLUSHED).mkdir()  # cannot be written
    collector.poll()


def test_flush_of_the_api(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "recorder", Recorder(None))
    assert api.flush(0.0), "nothing is recorded, nothing is missing"
    monkeypatch.setattr(runtime, "recorder", Recorder(directory))
    assert not api.flush(0.0), "nobody collects"
    monkeypatch.setattr(runtime, "recorder", Recorder(directory / "gone"))
    assert not api.flush(5.0)


# ---------------------------------------------------------------- the store as a sink


def test_a_store_that_fails_is_said_once(tmp_path: Path) -> None:
    said: list[str] = []
    sink = StoreSink(StoreWriter(tmp_path / "s.db"), said.append)

    def fail(*_: object) -> None:
        if not sink.writer.failed:
            sink.writer.failed = True
            raise StoreError("s.db: no room left")

    sink.writer.write_requests = fail  # type: ignore[method-assign]
    for _ in range(3):
        sink.run(RunRecord("session"))
        sink.requests([])
        sink.steps([])
        sink.flush()
    sink.close()
    assert said == ["s.db: no room left; serving goes on, storing has ended"]


def test_say_is_one_line_on_stderr_whatever_becomes_of_it(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    say("said \udcff")
    assert capfd.readouterr() == ("", "stagetrace: said ?\n")
    monkeypatch.setattr(sys, "stderr", None)
    say("into a file that happens to be number 2")
    assert capfd.readouterr() == ("", "")


# ---------------------------------------------------------------- as a process of its own

COLLECT = [sys.executable, "-m", "stagetrace.collect"]
#: Records a call in the session it is told, once it is told to; ends when its input does.
ENGINE = """
import sys
from pathlib import Path
from stagetrace import marks
from stagetrace.recorder import Recorder
recorder = Recorder(Path(sys.argv[1]))
recorder.mark(marks.ROOT, 1, 1, 1, 1)
print("ready", flush=True)
sys.stdin.read()
recorder.mark(marks.END, 1)
"""


def test_it_ends_after_the_last_writer(base: Path, tmp_path: Path) -> None:
    directory, store = session.create(), tmp_path / "s.db"
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert engine.stdout
    assert engine.stdout.readline() == b"ready\n"
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    session.write(directory / session.OWNER, f"{dead.pid} x")  # who started it is gone, another process writes on
    collector = subprocess.Popen([*COLLECT, str(directory), "--store", str(store)])
    wait_until(lambda: session.owner(directory) == collector.pid, "the collector has taken over")
    wait_until(lambda: session.live() == [directory], "it holds the session")
    # A Ctrl-C and a SIGTERM are meant for the server.
    wait_until(lambda: _ignores(collector.pid, signal.SIGTERM), "it is ready")
    collector.send_signal(signal.SIGINT)
    collector.send_signal(signal.SIGTERM)
    session.write(directory / session.FLUSH, "5")
    wait_until((directory / session.FLUSHED).exists, "it goes on for the writer's sake")
    engine.communicate()
    assert collector.wait(DEADLINE_S) == 0
    assert len(load(store).requests) == 1
    assert list(base.iterdir()) == []


def _ignores(pid: int, number: int) -> bool:
    (mask,) = [line.split()[1] for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "SigIgn" in line]
    return bool(int(mask, 16) >> number - 1 & 1)


def test_it_ends_even_if_who_started_it_died_first(base: Path) -> None:
    """Asked only by then, the parent would be process 1, which never dies."""
    directory = session.create()
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    session.write(directory / session.OWNER, f"{dead.pid} x")
    assert subprocess.run([*COLLECT, str(directory)], timeout=DEADLINE_S).returncode == 0
    assert not directory.exists()


@pytest.mark.parametrize("what", ["open to others", "not there", "a link"])
def test_it_refuses_what_is_no_session(directory: Path, what: str) -> None:
    named = directory
    if what == "open to others":
        directory.chmod(0o755)
    else:
        named = directory.parent / "named"
    if what == "a link":
        named.symlink_to(directory)
    done = subprocess.run([*COLLECT, str(named)], capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stdout) == (2, "")
    (said,) = done.stderr.splitlines()
    assert str(named) in said
    assert directory.exists()


def test_a_store_it_cannot_have_leaves_the_engine_alone(base: Path, tmp_path: Path) -> None:
    (tmp_path / "s.db").write_text("a letter")
    code = """
        import json, sys, time, stagetrace
        from stagetrace import runtime
        runtime.options({"store": sys.argv[1]})
        runtime.engine_starts()
        runtime.engine_starts()
        runtime.recorder.mark(99, 1)
        while stagetrace.status()["store"] is None:
            time.sleep(0.01)
        print(json.dumps([stagetrace.flush(60), stagetrace.status()["store"], str(runtime.directory())]))
    """
    done = python(code, tmp_path / "s.db", **plain_environment(), **{session.BASE_ENV: str(base)})
    assert done.returncode == 0
    flushed, told, named = json.loads(done.stdout)
    directory = Path(named)
    assert directory.parent == base
    assert (flushed, told["file"]) == (False, str(tmp_path / "s.db"))
    assert "not a stagetrace store" in told["fault"] and told["fault"] in done.stderr
    wait_until(lambda: not directory.exists(), "the collector tidies up")
    (said,) = done.stderr.splitlines()
    assert "nothing will be stored" in said
    assert (tmp_path / "s.db").read_text() == "a letter"


def test_rings_of_this_file_s_helpers_are_rings(directory: Path) -> None:
    craft(directory / "ring-1-0-0", [record(1)])
    assert [ring.capacity for ring in rings(directory)] == [8]


def test_who_flushes_is_not_told_that_a_store_has_what_it_has_not(tmp_path: Path) -> None:
    directory = tmp_path / "session"
    directory.mkdir(mode=0o700)
    for sinks, answered in ([NoStore("s.db", "s.db: is a directory")], False), ([], True):
        collector = Collector(directory, sinks)
        session.write(directory / session.FLUSH, "17")
        collector.poll()
        assert (directory / session.FLUSHED).exists() is answered
        collector.close()


def test_what_becomes_of_the_store_is_known_in_the_engine_s_process(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "recorder", Recorder(directory))
    assert api.status()["store"] is None
    Collector(directory, [NoStore("/x/s.db", "/x/s.db: is a directory")])
    assert api.status()["store"] == {"file": "/x/s.db", "fault": "/x/s.db: is a directory"}
    assert not api.flush(60.0), "and there is nothing to wait for"
    said: list[str] = []
    path = tmp_path / "s.db"
    collector = Collector(directory, [StoreSink(StoreWriter(path), said.append)])
    assert api.status()["store"] == {"file": str(path), "fault": None}
    call(runtime.recorder)
    collector.store.writer._db.execute("PRAGMA query_only=ON")
    session.write(directory / session.FLUSH, "99")
    collector.close()
    (line,) = [line for line in said if "storing has ended" in line]
    assert line.startswith(api.status()["store"]["fault"]) and str(path) in line
    assert not (directory / session.FLUSHED).exists()


def test_a_store_that_a_reader_holds_is_no_place_for_what_is_flushed(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path / "s.db")
    sink = StoreSink(writer, print)
    assert sink.fault is None
    writer._blocked = True
    assert sink.fault and "a reader holds it open" in sink.fault


def test_the_session_says_which_traces_go_out(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "recorder", Recorder(directory))

    class Sending(Sink):
        def __init__(self, share: float) -> None:
            super().__init__()
            self.traces = share

    Collector(directory, [Sink()])
    assert runtime.exported_share() is None
    Collector(directory, [Sink(), Guarded("sending", Sending(0.25), print), Sending(0.0)])
    assert runtime.exported_share() == 0.25
    session.write(directory / session.TRACES, "")  # as it may look for a moment
    assert runtime.exported_share() is None
