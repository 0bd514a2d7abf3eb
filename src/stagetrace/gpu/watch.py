"""What a collector has to do with GPUs: which cards there are to sample, the thread that does, what it has brought."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from ..assemble.book import Book
from ..model import GpuSample
from .history import History
from .join import Join
from .nvml import silence
from .sampler import LEAST_HZ, MOST_HZ, Sampler, Say

#: Names the cards, as ``CUDA_VISIBLE_DEVICES`` would, for engines whose workers cannot.
CARDS_ENV = "STAGETRACE_GPU_UUIDS"
#: How often they are asked, in Hz, from 1 to 4; 0: never.
HZ_ENV = "STAGETRACE_GPU_HZ"
#: Of what it costs, half of the most that is of any use: figures that the driver has averaged over up to a second.
USUAL_HZ = 2.0
#: A driver that has not answered for so long is said to hang.
HUNG_S = 10.0
STOP_S = 1.0


class Watch:
    """Give it to a collector. Nothing is loaded and no thread started before there is an engine, and a card to ask."""

    def __init__(self, say: Say, environment: Mapping[str, str]) -> None:
        self.history = History()
        self.join: Join | None = None
        self._say = say
        self._named = [name.strip() for name in environment.get(CARDS_ENV, "").split(",") if name.strip()]
        self._hz = self._rate(environment.get(HZ_ENV, ""))
        self._sampler: Sampler | None = None
        #: The cards that workers have named, by process.
        self._reported: dict[int, str] = {}
        self._hung = self._puzzled = False

    def poll(self, book: Book) -> list[GpuSample]:
        """Start what is to be started; return the samples that have come."""
        if self._hz <= 0:
            return []
        if self.join is None:
            self.join = Join(book, self.history, lambda engine: self._cards_of(book, engine), self._say)
        if fresh := self._fresh(book):
            if self._sampler is None:
                self._sampler = Sampler(self._hz, self._say)
                self._sampler.want(fresh)
                self._sampler.start()
            self._sampler.want(fresh)
        return self._drain()

    def hurry(self) -> None:
        """Somebody waits for records: have the samples they lack soon."""
        if self._sampler:
            self._sampler.hurry()

    def close(self) -> list[GpuSample]:
        """The last samples; there are no more."""
        if self._sampler is None:
            return []
        self._sampler.stop(STOP_S)
        return self._drain()

    def names(self) -> dict[str, str]:
        """The cards that have been sampled, id → name."""
        return {card: track.name or card for card, track in self.history.tracks.items()}

    def state(self) -> dict[str, Any]:
        """For `doctor`: the cards that are sampled, how often, and what went wrong."""
        if self._sampler is None:
            return {"cards": {}, "interval_s": None, "faults": []}
        sampler = self._sampler
        return {"cards": dict(sampler.cards), "interval_s": sampler.interval_s, "faults": list(sampler.faults)}

    def _drain(self) -> list[GpuSample]:
        sampler, samples = self._sampler, []
        if sampler is None:
            return []
        self.history.period_ns = int(sampler.interval_s * 1e9)
        while sampler.readings:
            reading = sampler.readings.popleft()
            self.history.add([reading])
            samples.append(reading.sample)
        asked = sampler.asked_at
        hangs = asked is not None and time.monotonic() - asked > HUNG_S
        for card, track in self.history.tracks.items():
            track.gone = hangs or card not in sampler.cards
        if hangs and not self._hung:
            self._hung = True
            self._say(f"the GPU driver has not answered for {HUNG_S:.0f} s: no GPU counters until it does")
            samples += [silence(track.card, track.name) for track in self.history.tracks.values()]
        return samples

    def _fresh(self, book: Book) -> list[str]:
        """Cards that have been named since the last time. An engine has to be there: any command may be run."""
        if not book.settings and not book.gpus:
            return []
        if self._named:
            return [] if self._sampler else self._named
        found = []
        for pid, (_, card) in _reports(book).items():
            if card != "-" and self._reported.get(pid) != card:
                self._reported[pid] = card
                found.append(card)
        if not self._reported and not self._puzzled and _unnamed(book):
            self._puzzled = True
            self._say(f"no GPU counters: no worker has said which card is its own; name it: {CARDS_ENV}=GPU-...")
        return found

    def _cards_of(self, book: Book, engine: int | None) -> list[str]:
        """The cards of an engine, by the number in its steps. Those a person has named are the only engine's."""
        tracks = self.history.tracks
        if self._named:
            return list(tracks) if len(book.last_step) < 2 else []
        if engine is None:
            return []
        said = _reports(book)
        own = next((said[pid][0] for pid in book.workers.get(engine, ()) if pid in said), None)
        if own is None and len({number for number, _ in said.values()}) == 1:
            own = next(iter(said.values()))[0]
        ids = self._sampler.ids if self._sampler else {}
        mine = (ids.get(card, "") for number, card in said.values() if number == own)
        return sorted({card for card in mine if card in tracks})

    def _rate(self, text: str) -> float:
        if not text:
            return USUAL_HZ
        try:
            hz = float(text)
        except ValueError:
            hz = -1.0
        if hz == 0 or LEAST_HZ <= hz <= MOST_HZ:
            return hz
        span = f"from {LEAST_HZ:.0f} to {MOST_HZ:.0f}, or 0 for never"
        self._say(f"{HZ_ENV}={text}: give a number {span}; {USUAL_HZ:.0f} is used")
        return USUAL_HZ


def _reports(book: Book) -> dict[int, tuple[str, str]]:
    """(engine, card) as each worker's process has named them."""
    words = {pid: text.split(" ", 3) for pid, text in book.gpus.items()}
    return {pid: (each[0], each[2]) for pid, each in words.items() if len(each) == 4}


def _unnamed(book: Book) -> bool:
    """Whether an engine works on a device that is no CPU, and nobody has said which."""
    return any(step.device_async for step in book.steps.values())
