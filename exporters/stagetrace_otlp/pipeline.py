"""A bounded queue and one thread in front of an exporter: a bad endpoint costs traces (counted) and no more."""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence

from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import Link

from stagetrace.exporting import Say

from .reasons import complaint, heard, reason
from .settings import Signal

#: Bytes per message, as estimated by :func:`weight`: well below the 4 MiB that a gRPC receiver takes.
BATCH_BYTES = 2 << 20
#: So many failed messages may lie about as garbage before it is collected: about 0.3 MB each.
GARBAGE_MESSAGES = 8


class Pipeline:
    """Takes whole traces; drops the oldest when full. ``sent`` and ``dropped`` (by reason) count spans."""

    def __init__(
        self,
        exporter: SpanExporter,
        say: Say,
        dropped: Counter[str],
        queue_spans: int = 16_384,
        batch_spans: int = 512,
        delay_s: float = 1.0,
        to: Signal | None = None,
    ) -> None:
        self.sent = 0
        self.dropped = dropped
        self._exporter = exporter
        self._say = say
        self._to = to
        self._room = queue_spans
        self._batch = batch_spans
        self._delay_s = delay_s
        self._queue: deque[Sequence[ReadableSpan]] = deque()
        self._held = 0
        #: Spans taken out of the queue whose fate is not known yet.
        self._away = 0
        self._failed = 0
        self._wake = threading.Condition()
        self._hurry = self._closing = self._over = self._complained = False
        # Started only now, in the collector: never in an engine's process.
        self._thread = threading.Thread(target=self._work, name="stagetrace-otlp", daemon=True)
        self._thread.start()

    @property
    def held(self) -> int:
        """Spans that wait."""
        return self._held

    @property
    def trouble(self) -> str:
        """Where spans do not go and why, in one line, unless that has been said or is not known."""
        why = heard.of(self._thread.ident)
        return f"{self._to.shown}: {why}" if self._to and why and not self._complained else ""

    def put(self, spans: Sequence[ReadableSpan]) -> None:
        """Queue one trace; never waits for the endpoint."""
        with self._wake:
            if self._closing:
                self.dropped["shutdown"] += len(spans)
                return
            self._queue.append(spans)
            self._held += len(spans)
            while self._held > self._room:
                oldest = self._queue.popleft()
                self._held -= len(oldest)
                self.dropped["queue_full"] += len(oldest)
            if self._held >= self._batch:
                self._wake.notify_all()

    def hurry(self) -> None:
        """Send what is queued without waiting for more; returns at once."""
        with self._wake:
            self._hurry = True
            self._wake.notify_all()

    def close(self, timeout_s: float) -> None:
        """Send what is queued, for at most ``timeout_s``; the rest is counted as dropped."""
        until = time.monotonic() + timeout_s
        with self._wake:
            self._closing = True
            self._wake.notify_all()
            while (self._away or self._queue) and (left := until - time.monotonic()) > 0:
                self._wake.wait(left)
            if left_over := self._held + self._away:
                self.dropped["shutdown"] += left_over
            self._over = True
            self._queue.clear()
            self._held = self._away = 0
        # It may hang in a connection of its own; nobody waits for that.
        aside(self._exporter.shutdown)

    def _work(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._held >= self._batch or self._hurry or self._closing, self._delay_s)
                self._hurry = False
                if self._closing and not self._queue:
                    return
                taken = self._take()
                self._away = len(taken)
            for message in messages(taken, self._batch):
                self._export(message)

    def _take(self) -> list[ReadableSpan]:
        taken: list[ReadableSpan] = []
        while self._queue and (not taken or len(taken) + len(self._queue[0]) <= self._batch):
            taken.extend(self._queue.popleft())
        self._held -= len(taken)
        return taken

    def _export(self, message: list[ReadableSpan]) -> None:
        kind, why = "refused", ""
        heard.forget()
        try:
            accepted = self._exporter.export(message) is SpanExportResult.SUCCESS
        except Exception as error:  # ours to survive, whatever an exporter raises
            accepted, kind, why = False, type(error).__name__, reason(error)
        with self._wake:
            if self._over:  # close() has given it up, and counted it
                return
            self._away -= len(message)
            if accepted:
                self.sent += len(message)
            else:
                self.dropped[kind] += len(message)
            self._wake.notify_all()
        if not accepted:
            self._fail(message, why or heard.of())

    def _fail(self, message: list[ReadableSpan], why: str) -> None:
        if not self._complained:
            self._complained = True
            self._say(complaint(self._to, f"{len(message)} spans", "drops are counted", why))
        # The official exporters keep the error in the frame that it was raised in: a cycle, which holds the message in
        # both its forms. So few objects, old ones, do not bring Python's own collection about for many minutes.
        message.clear()
        self._failed += 1
        if self._failed % GARBAGE_MESSAGES == 0:
            gc.collect()


def aside(work: Callable[[], object]) -> threading.Thread | None:
    """Do ``work`` in a thread; None in a program that is ending and may start none (where we are a guest)."""
    thread = threading.Thread(target=work, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread


def messages(spans: Sequence[ReadableSpan], most: int) -> Iterator[list[ReadableSpan]]:
    """``spans`` in portions of at most ``most`` spans and ``BATCH_BYTES``, each at least one span."""
    portion: list[ReadableSpan] = []
    size = 0
    for span in spans:
        weighs = weight(span)
        if portion and (len(portion) == most or size + weighs > BATCH_BYTES):
            yield portion
            portion, size = [], 0
        portion.append(span)
        size += weighs
    if portion:
        yield portion


def weight(span: ReadableSpan) -> int:
    """An upper estimate of what a span takes on the wire."""
    state = span.context.trace_state if span.context else None
    size = 200 + len(span.name) * 4 + sum(2 + len(key) + len(value) for key, value in (state or {}).items())
    extras: list[Event | Link] = [*span.events, *span.links]
    for attributes in (span.attributes or {}, *(each.attributes or {} for each in extras)):
        size += 30
        for key, value in attributes.items():
            size += 24 + len(key) + 4 * (len(value) if isinstance(value, str) else 0)
            if isinstance(value, list | tuple):
                size += sum(16 + 4 * len(str(each)) for each in value)
    return size
