"""A thread that asks every card for its counters a few times a second, more rarely where asking takes long."""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from statistics import median_low

from .nvml import Card, Driver, GpuFault, Lost, Reading

#: The driver averages its figures over a sixth of a second to a second: looking more often shows the same ones again.
LEAST_HZ, MOST_HZ = 1.0, 4.0
#: One look takes at most so much of the time until the next.
SHARE = 0.1
SLOWEST_S = 10.0
_ROUNDS = 3
Say = Callable[[str], None]


class Sampler:
    """Samples the cards it is told of from :meth:`start` on. ``readings`` is emptied by whoever reads it."""

    def __init__(self, hz: float, say: Say) -> None:
        self.readings: deque[Reading] = deque()
        #: Cards that are sampled, id → name; what went wrong; what has ended by itself.
        self.cards: dict[str, str] = {}
        #: The driver's name for a card, by what it was asked for under.
        self.ids: dict[str, str] = {}
        self.faults: list[str] = []
        self.over = False
        #: Seconds from one look to the next.
        self.interval_s = self._usual_s = 1 / min(hz, MOST_HZ)
        #: When the driver was last asked and has not answered yet, by ``time.monotonic``; None in between.
        self.asked_at: float | None = None
        self._say = say
        self._wanted: deque[str] = deque()
        self._known: set[str] = set()
        self._open: list[Card] = []
        self._took: deque[float] = deque(maxlen=_ROUNDS)
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._slow = False
        self._thread = threading.Thread(target=self._work, name="stagetrace-gpu", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def want(self, cards: Iterable[str]) -> None:
        """Sample these, too."""
        for ident in cards:
            if ident not in self._known:
                self._known.add(ident)
                self._wanted.append(ident)
                self._wake.set()

    def hurry(self) -> None:
        """Look again soon: somebody waits for it."""
        self._wake.set()

    def stop(self, timeout_s: float) -> None:
        """Look a last time and end; a driver that does not answer is not waited for."""
        self._stop.set()
        self._wake.set()
        self._thread.join(timeout_s)

    def _work(self) -> None:
        # Signals are for the main thread.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self.asked_at = time.monotonic()
            driver = Driver()
            try:
                self._run(driver)
            finally:
                driver.close()
        except GpuFault as fault:
            self._fault(f"no GPU counters: {fault}")
        except Exception as error:  # whatever bindings of another age do: ours to survive
            self._fault(f"no GPU counters: {type(error).__name__}: {error}")
        finally:
            self.asked_at, self.over = None, True
            self.cards.clear()

    def _run(self, driver: Driver) -> None:
        while True:
            last = self._stop.is_set()
            begun = time.monotonic()
            self.asked_at = begun
            self._admit(driver)
            self._look()
            self.asked_at = None
            ended = time.monotonic()
            self._pace(ended - begun)
            if last:
                return
            self._wait(begun)

    def _wait(self, begun: float) -> None:
        """Until the next look is due; earlier where somebody waits, but not so that it is too often."""
        due = begun + self.interval_s
        if self._wake.wait(max(due - time.monotonic(), 0)) and not self._stop.is_set():
            soon = begun + max(1 / MOST_HZ, min(self.interval_s, self._took[-1] / SHARE))
            self._stop.wait(max(min(soon, due) - time.monotonic(), 0))
        self._wake.clear()

    def _admit(self, driver: Driver) -> None:
        while self._wanted:
            ident = self._wanted.popleft()
            try:
                card = driver.card(ident)
            except GpuFault as fault:
                self._fault(f"no counters of {fault}")
                continue
            self.ids[ident] = card.id
            if card.id not in self.cards:  # known under another name
                self.cards[card.id] = card.name
                self._open.append(card)

    def _look(self) -> None:
        for card in list(self._open):
            try:
                self.readings.append(card.read())
            except Lost as lost:
                self._open.remove(card)
                self.readings.append(card.last())
                del self.cards[card.id]
                self._fault(
                    f"GPU {card.id} ({card.name}) does not answer any more ({lost}): no counters of it from here"
                )
                continue
            for line in card.faults():
                self._fault(line)

    def _pace(self, took_s: float) -> None:
        self._took.append(took_s)
        # Of the last few, so that one that was held up does not count.
        self.interval_s = min(max(self._usual_s, median_low(self._took) / SHARE), SLOWEST_S)
        if self.interval_s > 1.5 * self._usual_s and not self._slow:
            self._slow = True
            self._say(
                f"the GPU driver takes {took_s * 1e3:.0f} ms to answer: asked every {self.interval_s:.1f} s for now"
            )

    def _fault(self, line: str) -> None:
        self.faults.append(line)
        self._say(line)
