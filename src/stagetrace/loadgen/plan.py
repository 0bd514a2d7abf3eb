"""What is sent and when: the same for the same seed, whatever the server does."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from .mix import Mix

_WORDS = """
time year people way day man thing woman life child world school state family student group country problem hand
part place case week company system program question work government number night point home water room mother
area money story fact month lot right study book eye job word business issue side kind head house service friend
father power hour game line end member law car city community name president team minute idea body information
back parent face others level office door health person art war history party result change morning reason
research girl guy moment air teacher force education
"""
WORDS = tuple(_WORDS.split())
POOL_WORDS = 20_000
#: So many words of a prompt are its own: enough that no two begin with the same block of the prefix cache.
FIRST_WORDS = 8


@dataclass(frozen=True)
class Ask:
    """One request to come. ``due_s`` counts from the load's start; None in a closed loop, where it is sent in turn."""

    index: int
    prompt_tokens: int
    output_tokens: int
    due_s: float | None


def plan(seed: int, prompt: Mix, output: Mix, rate: float | None, count: int | None) -> Iterator[Ask]:
    """Requests without end, or ``count`` of them; Poisson arrivals where there is a ``rate``."""
    lengths, arrivals = random.Random(f"lengths {seed}"), random.Random(f"arrivals {seed}")
    index, due = 0, 0.0
    while count is None or index < count:
        if rate is not None and index:
            due += arrivals.expovariate(rate)
        yield Ask(index, prompt.draw(lengths), output.draw(lengths), None if rate is None else due)
        index += 1


@dataclass(frozen=True)
class Calibration:
    """How many characters make a token here, and how many tokens a chat's frame adds: seen in ``usage``, not known."""

    characters_per_token: float = 4.0
    overhead_tokens: float = 0.0
    #: "usage" of the requests sent for it; "assumed" where the server told no usage.
    source: str = "assumed"

    def characters(self, tokens: int) -> int:
        """The length of a text that makes a prompt of about so many tokens."""
        return max(1, round((tokens - self.overhead_tokens) * self.characters_per_token))


def calibrated(points: list[tuple[int, int | None]]) -> Calibration:
    """From (characters, prompt tokens) of requests of two lengths; nothing is learnt if one of them was refused."""
    known = sorted((characters, tokens) for characters, tokens in points if tokens)
    if len(known) < 2 or known[0][1] >= known[-1][1]:
        return Calibration()
    (few, low), (many, high) = known[0], known[-1]
    ratio = (many - few) / (high - low)
    return Calibration(ratio, max(0.0, low - few / ratio), "usage")


class Texts:
    """Prompts of common words, the same for the same seed; made by slicing, since others' answers come meanwhile."""

    def __init__(self, seed: int, calibration: Calibration) -> None:
        self._seed = seed
        self._calibration = calibration
        rng = random.Random(f"pool {seed}")
        self._pool = " ".join(rng.choice(WORDS) for _ in range(POOL_WORDS)) + " "

    def prompt(self, ask: Ask, shared_prefix: int) -> str:
        """The prompt of ``ask``; its first ``shared_prefix`` tokens are the same in every one."""
        whole = self._calibration.characters(ask.prompt_tokens)
        shared = min(whole, self._calibration.characters(shared_prefix)) if shared_prefix else 0
        return (
            (self.text("shared", shared) + self.text(ask.index, whole - shared))
            if shared
            else self.text(ask.index, whole)
        )

    def text(self, name: object, characters: int) -> str:
        """Exactly so many characters; those of two names differ from their first words on."""
        rng = random.Random(f"text {self._seed} {name}")
        start = " ".join(rng.choice(WORDS) for _ in range(FIRST_WORDS)) + " "
        at = rng.randrange(len(self._pool))
        text = start + self._pool[at:]
        while len(text) < characters:
            text += self._pool
        return text[:characters]
