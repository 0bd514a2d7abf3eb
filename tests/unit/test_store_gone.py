"""A store whose file somebody takes away, or swaps, while it is written: nothing is lost that could be kept."""

from __future__ import annotations

import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from stagetrace.model import RunRecord
from stagetrace.store import StoreError, StoreWriter, load
from tests.unit.stored import RUN, filled, request, step

SAID = "was removed, moved or replaced while it was written; what comes now goes into what has that name"


def begun(path: Path) -> StoreWriter:
    """A writer with request 0 committed, and request 1 and step 1 not yet."""
    writer = StoreWriter(path)
    writer.write_run(RUN)
    writer.write_requests([request(0)])
    writer.write_steps([step(0)])
    writer.commit()
    writer.write_requests([request(1)])
    writer.write_steps([step(1)])
    return writer


def sound(path: Path) -> bool:
    with closing(sqlite3.connect(path)) as db:
        return bool(db.execute("PRAGMA integrity_check").fetchall() == [("ok",)])


@pytest.mark.parametrize(
    "taken",
    [("s.db",), ("s.db", "s.db-wal", "s.db-shm"), ("s.db", "s.db-wal", "s.db-shm", "s.db-lock"), ("s.db", "s.db-lock")],
)
def test_removed_and_what_was_not_committed_is_in_a_new_one(tmp_path: Path, taken: tuple[str, ...]) -> None:
    path = tmp_path / "s.db"
    with begun(path) as writer:
        for name in taken:
            (tmp_path / name).unlink()
        writer.write_requests([request(2)])
        writer.write_steps([step(2)])
        writer.commit()
        assert writer.notices() == [f"store {path} {SAID}"]
        assert [r.request_id for r in load(path).requests] == ["chatcmpl-1", "chatcmpl-2"], "readable at once"
        with pytest.raises(StoreError, match="another stagetrace is writing it"):
            StoreWriter(path)
        writer.write_requests([request(3)])
    assert writer.notices() == [] and writer.lost_requests == 0
    trace = load(path)
    assert (trace.runs, trace.requests, trace.steps) == ([RUN], [request(n) for n in (1, 2, 3)], [step(1), step(2)])
    assert sound(path) and [p.name for p in tmp_path.iterdir()] == ["s.db"]


def test_removed_in_the_last_moment_and_again(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    writer = begun(path)
    for number in (2, 3):
        path.unlink()
        writer.write_requests([request(number)])
    path.unlink()
    writer.close()
    assert load(path).requests == [request(n) for n in (1, 2, 3)]
    assert writer.notices() == [f"store {path} {SAID}"] * 3


def test_moved_away_it_is_whole_where_it_is_now(tmp_path: Path) -> None:
    path, elsewhere = tmp_path / "s.db", tmp_path / "kept.db"
    with begun(path) as writer:
        path.rename(elsewhere)
        writer.write_requests([request(2)])
    assert load(path).requests == [request(1), request(2)]
    assert load(elsewhere).requests == [request(0), request(1)]
    assert sound(path) and sound(elsewhere)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["kept.db", "s.db"]


def test_without_its_log_nothing_is_lost_nor_said(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    with begun(path) as writer:
        (tmp_path / "s.db-wal").unlink()
        writer.write_requests([request(2)])
        writer.commit()
        assert load(path).requests == [request(0), request(1), request(2)]
    assert writer.notices() == [] and load(path).requests == [request(0), request(1), request(2)]


def test_another_store_in_its_place_is_appended_to(tmp_path: Path) -> None:
    path, other = tmp_path / "s.db", tmp_path / "other.db"
    with StoreWriter(other) as before:
        before.write_run(RunRecord("session-0"))
        before.write_requests([request(7)])
    with begun(path) as writer:
        os.replace(other, path)
        writer.write_requests([request(8)])
    trace = load(path)
    assert trace.requests == [request(1), request(7), request(8)]
    assert [run.session for run in trace.runs] == ["session-0", "session-1"]
    assert sound(path)


def test_a_letter_in_its_place_is_left_alone(tmp_path: Path) -> None:
    path, letter = tmp_path / "s.db", tmp_path / "letter"
    letter.write_text("Dear reader\n" * 99)
    writer = begun(path)
    os.replace(letter, path)
    with pytest.raises(StoreError, match=r"s\.db: not a stagetrace store"):
        writer.commit()
    writer.write_requests([request(2)])
    writer.close()
    assert writer.failed and writer.lost_requests == 2
    assert path.read_text().startswith("Dear reader")
    assert [p.name for p in tmp_path.iterdir()] == ["s.db"]


def test_its_directory_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "data" / "s.db"
    path.parent.mkdir()
    writer = begun(path)
    shutil.rmtree(path.parent)
    with pytest.raises(StoreError, match=r"s\.db"):
        writer.commit()
    writer.close()
    assert writer.lost_requests == 1


def test_another_writer_has_taken_the_name(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    writer = begun(path)
    for name in ("s.db", "s.db-wal", "s.db-shm", "s.db-lock"):
        (tmp_path / name).unlink()
    with StoreWriter(path) as other:
        other.write_run(RUN)
        with pytest.raises(StoreError, match="another stagetrace is writing it"):
            writer.commit()
        writer.close()
        other.write_requests([request(5)])
        with pytest.raises(StoreError, match="another stagetrace is writing it"):
            StoreWriter(path)
    assert load(path).requests == [request(5)]


def test_a_reader_that_goes_does_not_look_like_it(tmp_path: Path) -> None:
    path = filled(tmp_path / "s.db")
    with StoreWriter(path) as writer:
        writer.write_run(RUN)
        for number in range(9, 12):
            with closing(sqlite3.connect(path)) as db:
                db.execute("SELECT count(*) FROM requests").fetchall()
                writer.write_requests([request(number)])
                writer.commit()
            load(path)
    assert writer.notices() == [] and len(load(path).requests) == 6
