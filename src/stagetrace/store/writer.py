"""Writing a store: one writer, one transaction a commit, the oldest removed when it is full."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import monotonic
from types import TracebackType
from typing import NamedTuple

from ..asked import MIN_STORE_BYTES
from ..model import GpuSample, RequestRecord, RunRecord, StepRecord
from . import files, schema
from .files import StoreError
from .oldest import drop_oldest
from .sizes import format_size

# SQLite's -shm and the least that -wal grows to; they count as part of the store.
_BESIDE_BYTES = 64 << 10
# How long one commit may remove old rows while there is still room: the caller has rings to read.
_PRUNE_SECONDS = 0.25
_STEP_BYTES = 160
_GPU_BYTES = 160
#: SQLite's own files beside the store.
_BESIDE = ("-wal", "-shm")
_HELD = "a reader holds it open for too long: nothing is stored until it lets go"


class Pruned(NamedTuple):
    """How many rows were removed in the store's whole life to keep it below its limit."""

    requests: int
    steps: int


class StoreWriter:
    """The one writer of a store. The constructor opens or makes it, or refuses with StoreError.

    After a failure to write (disk full) StoreError is raised once; from then on every call does nothing
    but count ``lost_requests``. A file that is removed, or moved away, while it is written gives place to a new one.
    Use it from one thread at a time.
    """

    def __init__(self, path: str | os.PathLike[str], max_bytes: int = 1 << 30) -> None:
        self.path = files.target(path)
        if max_bytes < MIN_STORE_BYTES:
            raise StoreError(
                f"{files.show(self.path)}: --store-max {format_size(max_bytes)} is too small; "
                f"give it at least {format_size(MIN_STORE_BYTES)}"
            )
        self.max_bytes = max_bytes
        self._room = max_bytes - _BESIDE_BYTES
        self.failed = False
        self.lost_requests = 0
        # What one transaction may hold: together with the write-ahead log it must fit in the margin.
        self._chunk = min(max_bytes // 64, 4 << 20)
        self._pending_bytes = 0
        self._handed_in = self._written = self._saved = 0
        self._run: tuple[int, RunRecord] | None = None
        self._session = ""
        # What a store that has gone takes with it, and a new one still can have.
        self._unsaved_requests: list[RequestRecord] = []
        self._unsaved_steps: list[StepRecord] = []
        self._unsaved_gpu: list[GpuSample] = []
        #: The files as they were opened, by what is behind the store's name.
        self._mine: dict[str, tuple[int, int] | None] = {}
        self._blocked = False
        self._told: set[str] = set()
        self._notices: list[str] = []
        self._closed = False
        self._lock = files.WriterLock(self.path)
        try:
            self._db = self._open()
        except BaseException:
            self._lock.release()
            raise

    def _open(self) -> sqlite3.Connection:
        db: sqlite3.Connection | None = None
        try:
            files.create_or_check(self.path)
            # Another thread may close it (at exit); the caller sees to it that only one uses it at a time.
            uri = f"{self.path.as_uri()}?mode=rw"
            db = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=5.0, check_same_thread=False)
            files.check(self.path, db)
            self._page = self._pragma(db, "page_size")
            db.execute("PRAGMA trusted_schema=OFF")
            db.execute("PRAGMA journal_mode=WAL").fetchall()
            db.execute("PRAGMA synchronous=NORMAL")
            db.execute("PRAGMA secure_delete=OFF")  # else pruning writes all it removes once more
            db.execute(f"PRAGMA wal_autocheckpoint={self._chunk_pages()}").fetchall()
            db.execute(f"PRAGMA journal_size_limit={self._chunk}").fetchall()
            meta = dict(db.execute("SELECT key, value FROM meta"))
            self._pruned = Pruned(meta["pruned_requests"], meta["pruned_steps"])
            self._prune(db, patience=float("inf"))  # it may have had a larger limit before
            self._mine = {end: files.identity(f"{self.path}{end}") for end in ("", *_BESIDE)}
        except BaseException as exc:
            if db:
                db.close()
            if isinstance(exc, (sqlite3.Error, OSError, KeyError)):
                raise files.explain(self.path, exc) from exc
            raise
        return db

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pruned(self) -> Pruned:
        """How much was removed so far."""
        return self._pruned

    @property
    def obstacle(self) -> str | None:
        """Why nothing is stored for the time being, in one line; None where it is."""
        return f"{files.show(self.path)}: {_HELD}" if self._blocked else None

    def notices(self) -> list[str]:
        """Return the lines a person should see, each once."""
        lines, self._notices = self._notices, []
        return lines

    # ------------------------------------------------------------ what is written

    def write_run(self, run: RunRecord) -> int:
        """Store ``run``, in the place of what its session said of this engine before; return its id.

        What is written from now on belongs to it unless told otherwise.
        """
        if self._ready():
            with self._guard() as db:
                self._put_run(db, run)
        return self._run[0] if self._run else 0

    def write_requests(self, requests: list[RequestRecord]) -> None:
        """Store requests; one that was stored before, while in flight, is replaced."""
        if not self._ready():
            self.lost_requests += len(requests)
            return
        run_id = self._run_id()
        self._handed_in += len(requests)
        with self._guard() as db:
            for request in requests:
                self._put_request(db, run_id, request)
                self._written += 1
                self._unsaved_requests.append(request)
                if self._pending_bytes > self._chunk:
                    self._save(db)

    def write_steps(self, steps: list[StepRecord]) -> None:
        """Store engine steps; one that was stored before is replaced."""
        if not self._ready():
            return
        run_id = self._run_id()
        # At least one, and few enough for one transaction.
        size = max(1, self._chunk // _STEP_BYTES)
        with self._guard() as db:
            for start in range(0, len(steps), size):
                self._put_steps(db, run_id, steps[start : start + size])
                self._unsaved_steps += steps[start : start + size]
                if self._pending_bytes > self._chunk:
                    self._save(db)

    def write_gpu(self, samples: list[GpuSample]) -> None:
        """Store what cards said; there are few of these, a handful a second."""
        if not self._ready():
            return
        run_id = self._run_id()
        with self._guard() as db:
            self._put_gpu(db, run_id, samples)
            self._unsaved_gpu += samples
            if self._pending_bytes > self._chunk:
                self._save(db)

    def _put_run(self, db: sqlite3.Connection, run: RunRecord) -> None:
        key = (run.session, run.engine)
        found = db.execute("SELECT run_id FROM runs WHERE session = ? AND engine IS ?", key).fetchone()
        self._begin(db)
        cursor = db.execute(schema.PUT_RUN, (found and found[0], *schema.run_row(run)))
        self._run = int(found[0] if found else cursor.lastrowid or 0), run
        self._session = run.session

    def _put_steps(self, db: sqlite3.Connection, run_id: int, steps: list[StepRecord]) -> None:
        self._begin(db)
        db.executemany(schema.PUT_STEP, [(run_id, *schema.step_row(step)) for step in steps])
        self._pending_bytes += _STEP_BYTES * len(steps)

    def _put_gpu(self, db: sqlite3.Connection, run_id: int, samples: list[GpuSample]) -> None:
        self._begin(db)
        db.executemany(schema.PUT_GPU, [(run_id, *schema.gpu_row(sample)) for sample in samples])
        self._pending_bytes += _GPU_BYTES * len(samples)

    def _put_request(self, db: sqlite3.Connection, run_id: int, request: RequestRecord) -> None:
        self._begin(db)
        row = schema.request_row(request)
        number = self._stored_as(db, request)
        if number is None:
            number = db.execute(schema.PUT_REQUEST, (None, run_id, *row)).lastrowid
        else:
            db.execute(schema.PUT_REQUEST, (number, run_id, *row))
            db.execute("DELETE FROM stages WHERE request = ?", (number,))
            db.execute("DELETE FROM token_times WHERE request = ?", (number,))
        stages = [(number, *schema.stage_row(stage)) for stage in request.stages]
        db.executemany(schema.PUT_STAGE, stages)
        self._pending_bytes += 300 + sum(60 + len(stage[-1]) for stage in stages)
        if request.token_times_ms:
            times = schema.pack_times(request.token_times_ms)
            db.execute(schema.PUT_TIMES, (number, *times))
            self._pending_bytes += len(times[-1])

    def _stored_as(self, db: sqlite3.Connection, request: RequestRecord) -> int | None:
        """Return the id under which this session stored ``request`` before.

        Then its request id may not have been known. The run does not count: another engine's may have become
        the current one since.
        """
        found = db.execute(
            "SELECT id FROM requests JOIN runs USING (run_id)"
            " WHERE trace_id = ? AND span_id = ? AND sequence = ? AND session = ?"
            " AND (request_id = ? OR (request_id = '' AND span_id <> ''))",
            (request.trace_id, request.span_id, request.sequence, self._session, request.request_id),
        ).fetchone()
        return int(found[0]) if found else None

    # ------------------------------------------------------------ transactions

    def commit(self) -> None:
        """Make what was written visible and lasting; remove the oldest if the store is full."""
        if self._ready():
            with self._guard() as db:
                self._save(db)

    def close(self) -> None:
        """Commit and let go of the file; harmless when done before."""
        if self._closed:
            return
        try:
            self.commit()
        finally:
            self._closed = True
            # Closing folds the write-ahead log into the file. If it cannot, a reader or the next writer will.
            with suppress(sqlite3.Error):
                self._db.close()
            self._lock.release()

    def _run_id(self) -> int:
        if self._run is None:
            raise ValueError("write_run comes before requests and steps")
        return self._run[0]

    def _ready(self) -> bool:
        """Say whether to write at all: not once failed or closed, nor while a reader blocks the log."""
        if not self.failed and not self._closed:
            if any(files.identity(f"{self.path}{end}") != mine for end, mine in self._mine.items()):
                with self._guard():
                    self._renew()
            if self._blocked:
                with self._guard() as db:
                    self._blocked = self._log_stuck(db)
        return not (self.failed or self._closed or self._blocked)

    def _renew(self) -> None:
        """Open what has our name now, or make it: what SQLite goes on writing is in files that nobody can find."""
        gone = files.identity(str(self.path)) != self._mine[""]
        with suppress(sqlite3.Error):  # a file that was only moved is to be whole without its log
            self._db.execute("PRAGMA busy_timeout=250").fetchall()
            if self._db.in_transaction:
                self._db.execute("COMMIT")
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        with suppress(sqlite3.Error):
            self._db.close()
        for end in _BESIDE:  # SQLite would read our old log into the new file
            if files.identity(f"{self.path}{end}") == self._mine[end]:
                with suppress(OSError):
                    os.unlink(f"{self.path}{end}")
        if not self._lock.named():
            old, self._lock = self._lock, files.WriterLock(self.path)
            old.release()
        self._db = self._open()
        self._blocked = False
        if gone:
            what = "was removed, moved or replaced while it was written; what comes now goes into what has that name"
            self._notices.append(f"store {files.show(self.path)} {what}")
            self._put_again(self._db)

    def _put_again(self, db: sqlite3.Connection) -> None:
        """Write what was not committed yet; what was is gone with the file."""
        self._pending_bytes = 0
        if self._run:
            self._put_run(db, self._run[1])
            for request in self._unsaved_requests:
                self._put_request(db, self._run[0], request)
            self._put_steps(db, self._run[0], self._unsaved_steps)
            self._put_gpu(db, self._run[0], self._unsaved_gpu)

    @contextmanager
    def _guard(self) -> Iterator[sqlite3.Connection]:
        try:
            yield self._db
        except (sqlite3.Error, OSError, StoreError) as exc:
            self.failed = True
            self.lost_requests += self._handed_in - self._saved
            with suppress(sqlite3.Error):
                self._db.rollback()
            if isinstance(exc, StoreError):
                raise
            raise files.explain(self.path, exc) from exc

    @staticmethod
    def _begin(db: sqlite3.Connection) -> None:
        if not db.in_transaction:
            db.execute("BEGIN IMMEDIATE")

    def _save(self, db: sqlite3.Connection) -> None:
        if db.in_transaction:
            db.execute("COMMIT")
        self._saved = self._written
        self._unsaved_requests.clear()
        self._unsaved_steps.clear()
        self._unsaved_gpu.clear()
        self._pending_bytes = 0
        self._prune(db, _PRUNE_SECONDS)
        self._blocked = self._log_stuck(db)

    def _log_stuck(self, db: sqlite3.Connection) -> bool:
        """Say whether a reader that never ends keeps the write-ahead log from being reused.

        It would then grow without bound, and a full disk is worse for the host than a hole in the store.
        """
        with suppress(FileNotFoundError):
            if os.stat(f"{self.path}-wal").st_size > max(self.max_bytes // 4, 2 * self._chunk):
                _, frames, moved = db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
                if moved < frames:
                    self._tell(_HELD)
                    return True
        return False

    def _tell(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            self._notices.append(f"store {files.show(self.path)} {line}")

    # ------------------------------------------------------------ keeping to the limit

    def _prune(self, db: sqlite3.Connection, patience: float) -> None:
        """Remove the oldest rows if the store is nearly full, down to 90 %, and give back pages beyond it."""
        if self._used(db) > 0.95 * self._room:
            limit = format_size(self.max_bytes)
            self._tell(f"reached --store-max {limit}: oldest requests are being removed")
            deadline = monotonic() + patience
            while (used := self._used(db)) > 0.9 * self._room:
                if (used <= self._room and monotonic() > deadline) or not self._drop_oldest(db):
                    break
        # Freed pages are used again; only those beyond the limit are given back.
        while (excess := self._pragma(db, "page_count") - self._room // self._page) > 0:
            pages = min(excess, self._chunk_pages(), self._pragma(db, "freelist_count"))
            if not pages:
                break
            db.execute(f"PRAGMA incremental_vacuum({pages})").fetchall()

    def _used(self, db: sqlite3.Connection) -> int:
        return self._page * (self._pragma(db, "page_count") - self._pragma(db, "freelist_count"))

    def _chunk_pages(self) -> int:
        return max(8, self._chunk // self._page)

    @staticmethod
    def _pragma(db: sqlite3.Connection, name: str) -> int:
        (value,) = db.execute(f"PRAGMA {name}").fetchone()
        return int(value)

    def _drop_oldest(self, db: sqlite3.Connection) -> bool:
        """Remove a little of everything, the oldest of it."""
        self._begin(db)
        requests, steps, samples = drop_oldest(db, self._session)
        db.execute("COMMIT")
        self._pruned = Pruned(self._pruned.requests + requests, self._pruned.steps + steps)
        return bool(requests or steps or samples)
