"""What goes first when a store is full: the oldest of everything, so that all of it goes equally far back."""

from __future__ import annotations

import sqlite3

_SPAN = "SELECT (SELECT max(id) FROM {0}) - (SELECT min(id) FROM {0}), (SELECT min(id) FROM {0})"


def drop_oldest(db: sqlite3.Connection, session: str) -> tuple[int, int, int]:
    """Remove 2 % of requests, of steps and of GPU samples, in the transaction that is open; returns how many.

    What runs in ``session`` is kept.
    """
    width, _ = db.execute(_SPAN.format("requests")).fetchone()
    # What a dead writer left in flight is finished, too.
    oldest = db.execute(
        "SELECT id FROM requests WHERE status <> 'in_flight'"
        " OR run_id NOT IN (SELECT run_id FROM runs WHERE session = ?) ORDER BY start_unix_ns LIMIT ?",
        (session, min(2000, 1 + (width or 0) // 50)),
    ).fetchall()
    for table, column in (("stages", "request"), ("token_times", "request"), ("requests", "id")):
        db.executemany(f"DELETE FROM {table} WHERE {column} = ?", oldest)
    steps, samples = _first(db, "steps"), _first(db, "gpu_samples")
    for key, count in (("pruned_requests", len(oldest)), ("pruned_steps", steps)):
        db.execute("UPDATE meta SET value = value + ? WHERE key = ?", (count, key))
    return len(oldest), steps, samples


def _first(db: sqlite3.Connection, table: str) -> int:
    """Remove the rows with the lowest ids; returns how many."""
    width, first = db.execute(_SPAN.format(table)).fetchone()
    if first is None:
        return 0
    return db.execute(f"DELETE FROM {table} WHERE id <= ?", (first + min(20_000, width // 50),)).rowcount
