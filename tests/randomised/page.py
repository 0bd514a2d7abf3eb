"""How a random run is shown: tables for the person, Markdown for the repository."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from .run import Outcome

#: Of what is wrong, so much is shown.
PROBLEMS = 20
INTRODUCTION = """\
Requests drawn by hypothesis go to real servers in rounds of 50, up to 64 at a time: chats, completions (also several
prompts at once, `n` > 1, stop strings, grammars, log-probabilities), responses, messages, token ids, embeddings; three
priorities, few KV blocks, five texts of each length, one client id for a fifth of them; nonsense that is to be refused
and bodies that never end. Of three in ten the client leaves, after 0.5 ms to 1.5 s or a few chunks. In the end the
server gets SIGTERM with all its slots taken and two requests waiting (the one that embeds: at rest).

Held for every stored record: its JSON form, the twelve stages and their states, no negative duration, no overlap but
the embedding's, nothing after the stage it ended in, sums and coverage, the decode's split, every token's time. For
every exported trace: one root, no child outside its parent, no overlap, nothing after the ending stage, all twelve
stages named. For every request: one root in the store, one at the back end (none where its caller does not sample),
nothing left in flight; status, reason, tokens and id as its client saw them. The rules are `tests/invariants.py` and
`tests/randomised/verdict.py`.
"""


def show(console: Console, name: str, about: str, outcome: Outcome) -> None:
    """Print one server's outcome."""
    console.print(f"[bold]{name}[/bold]: {about}")
    for line in _lines(outcome):
        console.print(f"  {line}", highlight=False, markup=False)
    for problem in outcome.problems[:PROBLEMS]:
        console.print(f"  {problem}", highlight=False, markup=False, style="red")


def page(found: Mapping[str, Outcome], abouts: Mapping[str, str], seed: int, facts: Mapping[str, Any]) -> str:
    """The document."""
    packages = ", ".join(f"{key} {value}" for key, value in facts.items() if key not in ("date", "cpu"))
    broken = sum(len(outcome.problems) for outcome in found.values())
    asked = sum(outcome.asked for outcome in found.values())
    verdict = "every rule held" if not broken else f"{broken} rules were broken"
    parts = [
        "<!-- One run of `make random`. -->\n# A random mix of requests, and every rule for every trace\n",
        f"Run {facts['date']} on {facts['cpu']} ({packages}), a machine shared with other work; seed {seed}. "
        f"**{asked:,} requests, {len(found)} servers: {verdict}.**\n",
        INTRODUCTION,
    ]
    for name, outcome in found.items():
        parts.append(f"## {name}: {abouts[name]}\n")
        parts.append("\n".join(f"* {line}" for line in _lines(outcome)) + "\n")
        parts += [f"Broken:\n\n```\n{problem}\n```\n" for problem in outcome.problems[:PROBLEMS]]
    return "\n".join(parts)


def _lines(outcome: Outcome) -> list[str]:
    endings = Counter({f"{status} {why}": count for (status, why), count in outcome.endings.items()})
    return [
        f"{outcome.asked:,} requests in {outcome.seconds:,.0f} s, {outcome.records:,} records, "
        f"{outcome.spans:,} spans; rules broken: {len(outcome.problems)}",
        f"kinds: {_counts(outcome.kinds)}",
        f"endings: {_counts(endings)}",
        f"sequences that {_counts(outcome.facts)}",
    ]


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{word} {count:,}" for word, count in counter.most_common())
