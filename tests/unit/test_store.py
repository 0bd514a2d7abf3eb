"""The store: what it refuses, what it keeps, what it does when the disk or the writer goes away."""

from __future__ import annotations

import hashlib
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stagetrace
from stagetrace import stages
from stagetrace.model import GpuSample, RequestRecord, RunRecord, StageRecord, StepRecord, empty_stages
from stagetrace.store import StoreError, StoreWriter, files, find, format_size, load, parse_size, schema
from tests.unit.helpers import ended, line
from tests.unit.stored import RUN, card_sample, filled, request, step


def contents(directory: Path) -> dict[str, bytes | None]:
    """Return every name below ``directory`` and the bytes of what is a regular file."""
    return {str(p): p.read_bytes() if stat.S_ISREG(p.lstat().st_mode) else None for p in directory.rglob("*")}


@contextmanager
def child(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Run ``code`` in a process of its own, which is killed at the end if it still runs."""
    paths = [str(Path(stagetrace.__file__).parents[1]), str(Path(__file__).parent)]
    preamble = "import sys\nfrom stagetrace.store import *\nfrom stored import request, step, RUN\n"
    process = subprocess.Popen(
        [sys.executable, "-c", preamble + textwrap.dedent(code), *map(str, arguments)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    with ended(process):
        yield process


WRITE_UNTIL_KILLED = """
    writer = StoreWriter(sys.argv[1])
    writer.write_run(RUN)
    number = 0
    while True:
        writer.write_requests([request(number)])
        writer.write_steps([step(number)])
        if number % 3 == 0:
            writer.commit()
            print(number, flush=True)
        number += 1
"""


def killed(path: Path) -> int:
    """Leave a store whose writer was killed in the middle; return the last request it said was committed."""
    with child(WRITE_UNTIL_KILLED, path) as process:
        said = [line(process) for _ in range(40)]
        process.send_signal(signal.SIGKILL)
        process.wait()
    return int(said[-1])


# ---------------------------------------------------------------- what is kept

names = st.text(max_size=12)
times = st.none() | st.floats(-1e9, 1e9)
counts = st.integers(0, 2**40)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | names,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=5,
)
attributes = st.dictionaries(names, json_values, max_size=3)


def stage_records(stage: stages.Stage) -> st.SearchStrategy[StageRecord]:
    state = st.sampled_from(stages.STATES)
    return st.builds(
        StageRecord,
        st.just(stage.number),
        st.just(stage.key),
        state,
        st.none() | names,
        times,
        times,
        attributes,
    )


microseconds = st.integers(0, 2**32 - 1).map(lambda time: time / 1000)
request_records = st.builds(
    RequestRecord,
    request_id=names, external_id=st.none() | names, trace_id=names, operation=names, model=st.none() | names,
    status=names, finish_reason=st.none() | names, active_stage=st.none() | names,
    prompt_tokens=st.none() | counts, cached_tokens=st.none() | counts, output_tokens=st.none() | counts,
    start_unix_ns=st.integers(0, 2**63 - 1), e2e_ms=times, ttft_ms=times, ttft_kind=st.none() | names,
    queue_ms=times, prefill_ms=times, itl_ms=st.dictionaries(names, times, max_size=4), coverage=times,
    coverage_ttft=times, unattributed_ms=times, preemptions=counts, sequence=counts,
    stages=st.tuples(*map(stage_records, stages.STAGES)).map(list),
    gaps_ms=st.dictionaries(names, st.floats(0, 1e9), max_size=3), span_id=names,
    parent_span_id=st.none() | names, internal_id=st.none() | names,
    token_times_ms=st.lists(microseconds, max_size=20), caller_sampled=st.none() | st.booleans(),
    engine=st.none() | counts, process=st.none() | counts, tracestate=st.none() | names,
    link_trace_id=st.none() | names, link_span_id=st.none() | names, http_status=st.none() | counts,
    error_type=st.none() | names,
)  # fmt: skip
spans = st.none() | st.tuples(counts, counts)
step_records = st.builds(
    StepRecord,
    step=counts, engine=counts, schedule_ns=st.tuples(counts, counts), batch_size=counts, tokens=counts,
    prefill_tokens=counts, running=counts, waiting=counts, kv_usage=st.floats(0, 1), update_ns=spans,
    execute_ns=spans, forward_ns=spans, lm_head_ns=spans, sample_call_ns=spans, sample_ns=spans,
    embedding_ns=spans, preempted=counts, device_async=st.booleans(), device_timed=st.booleans(),
)  # fmt: skip
run_records = st.builds(
    RunRecord,
    names,
    st.none() | names,
    st.none() | names,
    st.none() | names,
    attributes,
    counts,
    st.lists(names),
)


@settings(max_examples=60, deadline=None)
@given(run_records, request_records, step_records)
def test_what_is_stored_is_what_is_loaded(run: RunRecord, one: RequestRecord, iteration: StepRecord) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "store.db")
        with StoreWriter(path) as writer:
            writer.write_run(run)
            writer.write_requests([one])
            writer.write_steps([iteration])
        trace = load(path)
    assert (trace.runs, trace.requests, trace.steps, trace.notices) == ([run], [one], [iteration], [])


def test_token_times_beyond_what_fits_in_four_bytes_are_kept_as_they_are(tmp_path: Path) -> None:
    odd = [[-0.5, 1.0], [5e6, 6e6 + 0.1234567], [float("inf")]]
    with StoreWriter(tmp_path / "s.db") as writer:
        writer.write_run(RUN)
        writer.write_requests([request(number, token_times_ms=given) for number, given in enumerate(odd)])
    assert [r.token_times_ms for r in load(tmp_path / "s.db").requests] == odd


def test_text_that_is_no_text_does_not_take_the_batch_with_it(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "s.db") as writer:
        writer.write_run(RUN)
        bad = request(0, external_id="a\udc80b")
        bad.stages[0].attributes = {"route": "\udc80", "odd": {1, 2}.__class__}
        writer.write_requests([bad, request(1)])
    first, second = load(tmp_path / "s.db").requests
    assert first.external_id == "a?b"
    assert second == request(1)


def test_a_request_in_flight_is_replaced_by_its_end(tmp_path: Path) -> None:
    early = request(0, status="in_flight", token_times_ms=[4.25], stages=empty_stages("not_reached")[:4])
    with StoreWriter(tmp_path / "s.db") as writer:
        writer.write_run(RUN)
        writer.write_requests([early, request(1, status="in_flight", request_id="")])
        writer.commit()
        assert load(tmp_path / "s.db").requests[0] == early
        writer.write_run(RunRecord("session-1", "another engine"))
        writer.write_requests([request(0, token_times_ms=[]), request(1)])
    assert load(tmp_path / "s.db").requests == [request(0, token_times_ms=[]), request(1)]


def test_requests_that_share_a_trace_are_told_apart(tmp_path: Path) -> None:
    same = {"trace_id": "7" * 32, "span_id": "7" * 16}
    given = [
        request(0, **same),
        request(0, **same, sequence=1),
        request(1, **same),  # a batch of prompts: one root, several engine requests
        request(2, trace_id="8" * 32, span_id=""),
        request(3, trace_id="8" * 32, span_id=""),
    ]
    with StoreWriter(tmp_path / "s.db") as writer:
        writer.write_run(RUN)
        writer.write_requests(given)
        writer.write_requests(given)
    assert load(tmp_path / "s.db").requests == given


def test_a_store_is_appended_to_and_sessions_stay_apart(tmp_path: Path) -> None:
    path = filled(tmp_path / "s.db")
    with StoreWriter(path) as writer:
        assert writer.write_run(RunRecord("session-2", "vllm")) == 2
        assert writer.write_run(RunRecord("session-2", "vllm", notes=["later"])) == 2
        writer.write_requests([request(0), request(9)])  # the same ids, yet another session's request
        writer.write_steps([step(0), step(7), step(7, forward_ns=(6, 9))])
    trace = load(path)
    assert [run.session for run in trace.runs] == ["session-1", "session-2"]
    assert (len(trace.requests), len(trace.steps)) == (5, 5)
    second = load(path, session="session-2")
    assert second.runs == [RunRecord("session-2", "vllm", notes=["later"])]
    assert second.requests == [request(0), request(9)]
    assert second.steps == [step(0), step(7, forward_ns=(6, 9))]


def test_a_part_can_be_loaded(tmp_path: Path) -> None:
    path = filled(tmp_path / "s.db", requests=9)
    trace = load(path, limit=2, steps=False)
    assert trace.requests == [request(7), request(8)]
    assert trace.steps == []
    assert load(path, limit=0).requests == []


def test_requests_are_found_by_any_of_their_ids(tmp_path: Path) -> None:
    trace = load(filled(tmp_path / "s.db"))
    for ident in ("chatcmpl-1", "x-1", "chatcmpl-1-ab", f"{2:032x}"):
        assert find(trace, ident) == [request(1)]
    assert find(trace, "chatcmpl") == find(trace, "CHATCMPL-1") == find(trace, "") == []
    for each in trace.requests:
        each.link_trace_id, each.external_id, each.internal_id = f"{0xAB:032x}", None, None
    assert find(trace, f"{0xAB:032X}") == trace.requests and find(trace, "none") == []


def test_what_cards_said_is_kept(tmp_path: Path) -> None:
    samples = [card_sample(t_ns=n, period_ns=n, card=f"GPU-{n % 2}") for n in range(1, 6)]
    samples.append(GpuSample("GPU-0", 9))
    with StoreWriter(tmp_path / "s.db") as writer:
        writer.write_run(RUN)
        writer.write_gpu(samples)
        writer.write_requests([request(1, gpu={"joules": 1.5, "throttled": None})])
    trace = load(tmp_path / "s.db")
    assert trace.gpu == samples, "and what is not known is None"
    assert trace.requests[0].gpu == {"joules": 1.5, "throttled": None}
    assert load(tmp_path / "s.db", steps=False).gpu == []


def test_a_person_can_read_it(tmp_path: Path) -> None:
    with closing(sqlite3.connect(filled(tmp_path / "s.db"))) as db:
        row = db.execute("SELECT key, state, duration_ms, attributes FROM stages WHERE number = 3").fetchone()
        gauges = db.execute("SELECT kv_cache_utilization, queue_depth, batch_size FROM gauges").fetchone()
        kept = db.execute("SELECT tokens, length(times) FROM token_times").fetchone()
        modes = [db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "auto_vacuum")]
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert row == ("tokenize", "measured", 0.75, '{"bytes":403,"route":"/v1/chat/completions"}')
    assert gauges == (0.25, 1, 2)
    assert kept == (3, 12)
    assert modes == ["wal", 2]


def test_other_tables_are_another_version() -> None:
    """Whoever changes a table changes what is written here: the version first, then what the tables come to."""
    tables = hashlib.blake2b(schema.DDL.encode(), digest_size=8).hexdigest()
    assert (schema.VERSION, tables) == (4, "4d0e208320dc28de")


def test_requests_need_a_run(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "s.db") as writer, pytest.raises(ValueError, match="write_run"):
        writer.write_requests([request()])


# ---------------------------------------------------------------- what is refused


def foreign_text(path: Path) -> str:
    path.write_text("not a database at all\n" * 99)
    return "not a stagetrace store"


def foreign_short(path: Path) -> str:
    path.write_bytes(b"x")
    return "not a stagetrace store"


def foreign_empty(path: Path) -> str:
    path.touch()
    return "empty"


def foreign_database(path: Path) -> str:
    with closing(sqlite3.connect(path)) as db:
        db.executescript("CREATE TABLE precious (a); INSERT INTO precious VALUES (1)")
    return "not a stagetrace store"


def foreign_database_left_by_a_killed_writer(path: Path) -> str:
    live = path.with_name("live.db")
    with closing(sqlite3.connect(live)) as db:
        db.execute("PRAGMA journal_mode=WAL")
        db.executescript("CREATE TABLE precious (a); INSERT INTO precious VALUES (1)")
        for suffix in ("", "-wal", "-shm"):
            Path(f"{path}{suffix}").write_bytes(Path(f"{live}{suffix}").read_bytes())
    live.unlink()
    return "not a stagetrace store"


def versioned(path: Path, version: int) -> None:
    with closing(sqlite3.connect(filled(path))) as db:
        db.execute(f"PRAGMA user_version={version}")


def newer(path: Path) -> str:
    versioned(path, schema.VERSION + 1)
    return "written by a newer stagetrace .*; upgrade stagetrace"


def older(path: Path) -> str:
    versioned(path, schema.VERSION - 1)
    return "written by an older stagetrace .*; move it away or name another file"


def directory(path: Path) -> str:
    path.mkdir()
    return "is a directory"


def pipe(path: Path) -> str:
    os.mkfifo(path)
    return "not a regular file"


def link_to_foreign(path: Path) -> str:
    said = foreign_text(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")
    return said


def truncated(path: Path) -> str:
    filled(path, requests=50)
    os.truncate(path, 3 * 4096 + 100)
    return "damaged"


REFUSED = (
    foreign_text, foreign_short, foreign_empty, foreign_database, foreign_database_left_by_a_killed_writer,
    newer, older, directory, pipe, link_to_foreign, truncated,
)  # fmt: skip


@pytest.mark.parametrize("use", [StoreWriter, load])
@pytest.mark.parametrize("make", REFUSED)
def test_a_file_that_is_not_ours_is_refused_and_left_alone(
    tmp_path: Path, make: Callable[[Path], str], use: Callable[[Path], object]
) -> None:
    path = tmp_path / "trace.db"
    said = make(path)
    before = contents(tmp_path)
    with pytest.raises(StoreError, match=said) as caught:
        use(path)
    message = str(caught.value)
    assert "\n" not in message
    assert "trace.db" in message or "elsewhere" in message
    shared = str(path) + "-shm"  # SQLite's lock table: no content
    assert {**contents(tmp_path), shared: None} == {**before, shared: None}


def test_a_missing_store_is_named_with_the_cure(tmp_path: Path) -> None:
    for path in (tmp_path / "no.db", filled(tmp_path / "s.db") / "below"):
        with pytest.raises(StoreError, match=r"^no such store: .*; run `stagetrace run --store"):
            load(path)
    assert [p.name for p in tmp_path.iterdir()] == ["s.db"]


def test_a_store_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to("nothing")
    with pytest.raises(StoreError, match="no such directory"):
        StoreWriter(tmp_path / "no" / "s.db")
    with pytest.raises(StoreError, match="a link to a file that is not there"):
        StoreWriter(tmp_path / "dangling")
    with pytest.raises(StoreError, match=r"at least 1\.0 MiB"):
        StoreWriter(tmp_path / "s.db", max_bytes=1000)
    assert [p.name for p in tmp_path.iterdir()] == ["dangling"]


def test_a_message_stays_on_one_line(tmp_path: Path) -> None:
    odd = tmp_path / "two\nlines"
    odd.mkdir()
    with pytest.raises(StoreError) as caught:
        StoreWriter(odd)
    assert "\n" not in str(caught.value)


def test_a_link_to_a_store_is_followed(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "link.db").symlink_to(filled(tmp_path / "data" / "s.db"))
    with StoreWriter(tmp_path / "link.db") as writer:
        writer.write_run(RUN)
        writer.write_requests([request(8)])
    assert len(load(tmp_path / "link.db").requests) == 4
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["data", "link.db", "s.db"]


def test_odd_names_are_only_names(tmp_path: Path) -> None:
    path = filled(tmp_path / "a ?mode=memory&b#%41.db")
    assert len(load(path).requests) == 3
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_only_the_owner_may_read_it(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        with StoreWriter(tmp_path / "s.db") as writer:
            writer.write_run(RUN)
            writer.commit()
            modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in tmp_path.iterdir()}
    finally:
        os.umask(before)
    assert sorted(modes) == ["s.db", "s.db-lock", "s.db-shm", "s.db-wal"]
    assert all(mode & 0o177 == 0 for mode in modes.values())
    assert [p.name for p in tmp_path.iterdir()] == ["s.db"]


def as_nobody(action: Callable[[], str]) -> str:
    """Run ``action`` in a fork that is not root (root may write anywhere) and return what it returns."""
    reading, writing = os.pipe()
    if not (pid := os.fork()):
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            os.write(writing, action().encode())
        except BaseException as exc:
            os.write(writing, f"{type(exc).__name__}: {exc}".encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe_end:
        said = pipe_end.read()
    os.waitpid(pid, 0)
    return said


@pytest.fixture
def locked_directory() -> Iterator[Callable[[], Path]]:
    """Give a directory that ``as_nobody`` may enter, and lock against writing when called."""
    with tempfile.TemporaryDirectory() as name:

        def lock() -> Path:
            if os.geteuid() == 0:
                for path in Path(name).iterdir():
                    os.chown(path, 65534, 65534)
            os.chmod(name, 0o555)
            return Path(name)

        yield lock
        os.chmod(name, 0o755)


def test_an_unwritable_directory_is_refused(locked_directory: Callable[[], Path]) -> None:
    path = locked_directory() / "s.db"
    said = as_nobody(lambda: str(StoreWriter(path)))
    assert said == f"StoreError: {path}: its directory may not be written; name a file elsewhere"


def test_a_store_in_an_unwritable_directory_is_read(locked_directory: Callable[[], Path]) -> None:
    path = locked_directory() / "s.db"
    os.chmod(path.parent, 0o755)
    filled(path)
    locked_directory()
    assert as_nobody(lambda: str(len(load(path).requests))) == "3"
    assert [p.name for p in path.parent.iterdir()] == ["s.db"]


def test_a_killed_writers_store_in_an_unwritable_directory_is_read(
    locked_directory: Callable[[], Path],
) -> None:
    path = locked_directory() / "s.db"
    os.chmod(path.parent, 0o755)
    last = killed(path)
    locked_directory()
    before = sorted(p.name for p in path.parent.iterdir())
    assert "s.db-wal" in before
    assert int(as_nobody(lambda: str(len(load(path).requests)))) > last
    assert sorted(p.name for p in path.parent.iterdir()) == before


# ---------------------------------------------------------------- one writer, many readers


def test_a_second_writer_is_refused_and_does_the_first_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    with StoreWriter(path) as first:
        first.write_run(RUN)
        first.write_requests([request(0)])
        with pytest.raises(StoreError, match="another stagetrace is writing it"):
            StoreWriter(path)
        with child("try: StoreWriter(sys.argv[1])\nexcept StoreError as exc: print(exc)", path) as other:
            assert "another stagetrace is writing it" in line(other)
        # Were the locks lost, the shell's end would remove the log under the writer.
        with child("import sqlite3\nsqlite3.connect(sys.argv[1]).execute('SELECT * FROM runs').fetchall()", path) as p:
            p.wait()
        first.write_requests([request(1)])
    assert load(path).requests == [request(0), request(1)]
    StoreWriter(path).close()


def test_a_strangers_file_in_the_locks_place_is_not_touched(tmp_path: Path) -> None:
    lock = tmp_path / "s.db-lock"
    lock.write_text("mine")
    with pytest.raises(StoreError, match=r"s\.db-lock: in the way"):
        StoreWriter(tmp_path / "s.db")
    assert contents(tmp_path) == {str(lock): b"mine"}
    lock.unlink()
    lock.symlink_to("s.db")
    with pytest.raises(StoreError, match=r"s\.db-lock"):
        StoreWriter(tmp_path / "s.db")


def test_closing_twice_is_harmless_and_what_comes_later_is_lost(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path / "s.db")
    writer.write_run(RUN)
    writer.close()
    writer.close()
    writer.write_requests([request(0), request(1)])
    writer.write_steps([step(0)])
    writer.commit()
    assert writer.lost_requests == 2
    assert load(tmp_path / "s.db").requests == []


def test_it_is_read_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    with StoreWriter(path) as writer:
        assert load(path).requests == []
        writer.write_run(RUN)
        writer.write_requests([request(0)])
        assert load(path).requests == []
        writer.commit()
        writer.write_requests([request(1)])
        names = sorted(p.name for p in tmp_path.iterdir())
        assert load(path).requests == [request(0)]
        with child("print(len(load(sys.argv[1]).requests))", path) as reader:
            assert line(reader) == "1"
            reader.wait()
        assert sorted(p.name for p in tmp_path.iterdir()) == names
    assert load(path).requests == [request(0), request(1)]


def test_reading_changes_and_creates_nothing(tmp_path: Path) -> None:
    path = filled(tmp_path / "s.db")
    before = contents(tmp_path)
    load(path)
    assert contents(tmp_path) == before


def test_a_writer_that_comes_while_it_is_read_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = filled(tmp_path / "s.db")
    calls: list[Path] = []
    reading = files.reading

    @contextmanager
    def disturbed(real: Path) -> Iterator[sqlite3.Connection]:
        with reading(real) as db:
            if not calls:
                filled(path, requests=20)
            calls.append(real)
            yield db

    monkeypatch.setattr(files, "reading", disturbed)
    assert len(load(path).requests) == 20
    assert len(calls) == 2


def test_a_locked_store_is_said_to_be_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = filled(tmp_path / "s.db")
    monkeypatch.setattr(files, "_BUSY_SECONDS", 0.1)
    with closing(sqlite3.connect(path)) as db:
        db.execute("SELECT * FROM runs").fetchall()  # so that there is a -shm
        db.execute("PRAGMA locking_mode=EXCLUSIVE")
        db.execute("UPDATE runs SET model = 'x'")
        db.commit()
        with pytest.raises(StoreError, match="locked by another program"):
            load(path)


@pytest.mark.parametrize("suffixes", [("", "-wal", "-shm"), ("", "-wal")])
def test_a_killed_writer_leaves_a_readable_store(tmp_path: Path, suffixes: tuple[str, ...]) -> None:
    path = tmp_path / "s.db"
    last = killed(path)
    for file in tmp_path.iterdir():
        if file.name.removeprefix("s.db") not in (*suffixes, "-lock"):
            file.unlink()
    names = sorted(p.name for p in tmp_path.iterdir())
    trace = load(path)
    assert len(trace.requests) > last
    assert trace.requests == [request(number) for number in range(len(trace.requests))]
    assert len(trace.steps) == len(trace.requests)
    assert sorted(p.name for p in tmp_path.iterdir()) == names
    with StoreWriter(path) as writer:  # its lock is gone with it
        writer.write_run(RunRecord("session-2"))
        writer.write_requests([request(10**6)])
    assert [p.name for p in tmp_path.iterdir()] == ["s.db"]
    assert len(load(path).requests) == len(trace.requests) + 1


def test_damaged_content_is_never_a_traceback(tmp_path: Path) -> None:
    path = filled(tmp_path / "s.db", requests=30)
    good = path.read_bytes()
    refused = 0
    for offset in range(100, len(good), 997):
        path.write_bytes(good[:offset] + b"\xff\x00\xfe" * 20 + good[offset + 60 :])
        try:
            load(path)
        except StoreError as exc:
            refused += 1
            assert "damaged" in str(exc)
    assert refused > 10


# ---------------------------------------------------------------- its limit


def on_disk(path: Path) -> int:
    return sum(p.stat().st_size for p in path.parent.iterdir() if p.name.startswith(path.name))


@pytest.mark.parametrize("batch", [1, 25, 2500])
def test_it_keeps_to_its_limit_and_says_so(tmp_path: Path, batch: int) -> None:
    path, limit = tmp_path / "s.db", 2 << 20
    largest, number, lines = 0, 0, []
    with StoreWriter(path, max_bytes=limit) as writer:
        writer.write_run(RUN)
        while number < 2500:
            numbers = range(number, number + batch)
            writer.write_requests([request(n) for n in numbers])
            writer.write_steps([step(n) for n in numbers])
            writer.commit()
            number += batch
            largest = max(largest, on_disk(path))
            lines += writer.notices()
        pruned = writer.pruned
    assert largest <= 1.1 * limit
    assert lines == [f"store {path} reached --store-max 2.0 MiB: oldest requests are being removed"]
    trace = load(path)
    assert trace.requests == [request(n) for n in range(pruned.requests, 2500)]
    assert trace.steps == [step(n) for n in range(pruned.steps, 2500)]
    assert 300 < len(trace.requests) < 2000
    assert len(trace.steps) > 300
    assert trace.notices == [
        f"store {path}: {pruned.requests} oldest requests and {pruned.steps} oldest steps were removed "
        "to keep to --store-max"
    ]
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        for table in ("stages", "token_times"):
            orphans = f"SELECT count(*) FROM {table} WHERE request NOT IN (SELECT id FROM requests)"
            assert db.execute(orphans).fetchone() == (0,)
    with StoreWriter(path, max_bytes=limit) as writer:
        assert writer.pruned == pruned


def test_what_is_in_flight_is_not_removed_until_its_writer_is_gone(tmp_path: Path) -> None:
    path, limit = tmp_path / "s.db", 1 << 20
    with StoreWriter(path, max_bytes=limit) as writer:
        writer.write_run(RUN)
        writer.write_requests([request(0, status="in_flight")])
        writer.write_requests([request(n) for n in range(1, 1000)])
    assert load(path).requests[0].status == "in_flight"
    with StoreWriter(path, max_bytes=limit) as writer:
        writer.write_run(RunRecord("session-2"))
        writer.write_requests([request(n) for n in range(1000, 2000)])
    assert {r.status for r in load(path).requests} == {"ok"}


def test_a_store_that_had_a_larger_limit_shrinks(tmp_path: Path) -> None:
    path = filled(tmp_path / "s.db", requests=2000)
    assert on_disk(path) > 2 << 20
    with StoreWriter(path, max_bytes=1 << 20) as writer:
        assert writer.pruned.requests > 500
    assert on_disk(path) <= 1.1 * (1 << 20)
    assert load(path).requests[-1] == request(1999)


def test_a_reader_that_never_ends_stops_the_store_not_the_host(tmp_path: Path) -> None:
    path, limit = tmp_path / "s.db", 1 << 20
    with StoreWriter(path, max_bytes=limit) as writer, closing(sqlite3.connect(path)) as reader:
        writer.write_run(RUN)
        writer.commit()
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM runs").fetchall()
        for number in range(3000):
            writer.write_requests([request(number)])
            writer.commit()
        assert on_disk(path) < 2 * limit
        assert writer.lost_requests > 100
        assert any("a reader holds it open" in said for said in writer.notices())
        reader.rollback()
        writer.write_requests([request(3000)])
    assert load(path).requests[-1] == request(3000)


# ---------------------------------------------------------------- when the disk is full


def test_a_full_disk_is_said_once_and_what_is_lost_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    with StoreWriter(path) as writer:
        writer.write_run(RUN)
        writer.write_requests([request(0), request(1)])
        writer.commit()
        pages = writer._db.execute("PRAGMA page_count").fetchone()[0]
        writer._db.execute(f"PRAGMA max_page_count={pages + 5}")
        with pytest.raises(StoreError, match=r"s\.db: no room left to write it") as caught:
            writer.write_requests([request(number) for number in range(2, 50)])
        assert "\n" not in str(caught.value)
        assert writer.failed
        writer.write_requests([request(50)])
        writer.write_steps([step(0)])
        writer.write_run(RUN)
        writer.commit()
        assert writer.lost_requests == 49
    assert load(path).requests == [request(0), request(1)]


def test_a_file_that_may_not_grow_does_not_end_the_process(tmp_path: Path) -> None:
    code = """
        import resource
        writer = StoreWriter(sys.argv[1])
        writer.write_run(RUN)
        writer.write_requests([request(0)])
        writer.commit()
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
        number = 1
        while not writer.failed:
            try:
                writer.write_requests([request(number)])
                writer.commit()
            except StoreError as exc:
                print(exc, flush=True)
            number += 1
        writer.close()
        print(number, writer.lost_requests, flush=True)
    """
    path = tmp_path / "s.db"
    with child(code, path) as process:
        said, (number, lost) = line(process), line(process).split()
        assert process.wait() == 0
    assert said.startswith(f"{path}: ")
    trace = load(path)
    assert trace.requests == [request(n) for n in range(int(number) - int(lost))]
    assert int(lost) == 1


def test_no_room_for_a_new_store_leaves_nothing_behind(tmp_path: Path) -> None:
    code = """
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        try:
            StoreWriter(sys.argv[1])
        except StoreError as exc:
            print(exc, flush=True)
    """
    with child(code, tmp_path / "s.db") as process:
        assert "s.db: " in line(process)
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1GiB", 1 << 30),
        ("500MB", 500_000_000),
        ("1048576", 1 << 20),
        (" 1.5 kib ", 1536),
        ("2g", 2 << 30),
        ("7B", 7),
    ],
)
def test_a_size_is_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "0", "1XB", "1 2", "nan", "1e9", "0.1", "٣GiB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^not a size: .*write 1GiB"):
        parse_size(text)


def test_sizes_are_shown() -> None:
    assert [format_size(n) for n in (5, 2048, 3 << 20, 1 << 30)] == [
        "5 bytes",
        "2.0 KiB",
        "3.0 MiB",
        "1.0 GiB",
    ]
