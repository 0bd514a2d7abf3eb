"""What one sequence's stages are computed from, gathered once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from .. import marks
from ..marks import Mark
from ..model import StepRecord
from .book import Book, Root, Sequence
from .life import Turn, first_token, prefill, turns, whole_prompt
from .periods import Periods

#: Finish codes of a request that did not come to its own end.
CUT_SHORT = tuple(code for code, name in marks.FINISH.items() if name in ("abort", "error"))


@dataclass
class Case:
    """Everything a stage may be computed from."""

    book: Book
    periods: Periods
    root: Root
    sequence: Sequence | None
    #: Which of the call's sequences it is. Not what the engine calls it: of several prompts each has an index 0.
    index: int = 0
    prompt: int = 0
    #: Nothing more can come from the call's own process.
    dead: bool = False
    turns: list[Turn] = field(default_factory=list)
    by_step: dict[int, Turn] = field(default_factory=dict)
    chunks: list[Turn] = field(default_factory=list)
    first: Turn | None = None
    #: End of stage 10, once known: TTFT ends and decoding starts here.
    first_text: int | None = None
    ttft_kind: str | None = None
    #: End of stage 11.
    decoded: int | None = None
    #: Starts of stages whose second mark is not there.
    began: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, book: Book, periods: Periods, root: Root, sequence: Sequence | None, dead: bool) -> Case:
        """Gather what is known of ``sequence``."""
        case = cls(book, periods, root, sequence, dead=dead)
        if sequence is not None:
            case.index = next((i for i, s in enumerate(root.sequences) if s is sequence), 0)
            case.sequence = sequence = own(sequence)
            case.prompt = max(sequence.added.b, 0) if sequence.added else 0
            window = sequence.added.t if sequence.added else 0, float("inf") if case.cut is None else case.cut
            case.turns = turns(book, sequence, window, case._delivered)
            case.by_step = {turn.step.step: turn for turn in case.turns}
            case.chunks = prefill(case.turns, case.prompt, sequence)
            case.first = whole_prompt(case.turns, case.prompt) if case.pools else first_token(case.turns, case.prompt)
        return case

    @property
    def pools(self) -> bool:
        """Whether it is to generate nothing: an embedding, a score, and the like are made of the prompt alone."""
        added = self.sequence.added if self.sequence else None
        return added is not None and added.c < 0

    def setting(self, name: str) -> int | None:
        """An engine setting as a number."""
        value = self.book.settings.get(name)
        return int(value) if value and value.lstrip("-").isdigit() else None

    def processed(self, step: StepRecord) -> tuple[int, int] | None:
        """When the front end entered and left the batch of outputs that ``step`` made."""
        outputs = self.book.outputs.get(self.root.pid)
        return outputs.within(step.update_ns) if outputs and step.update_ns else None

    def _delivered(self, step: StepRecord) -> bool:
        """Whether the front end took the step's tokens: the engine makes some after a stop string or an abort, too."""
        if self._orphaned:
            return self.processed(step) is not None
        stopped = self.sequence.stopped if self.sequence else None
        if step.update_ns is None or (stopped is None and self.cut is None):
            return True
        limit = min(t for t in (stopped, self.cut) if t is not None)
        done = self.processed(step) if self.cut is None else None
        return (done or step.update_ns)[1] <= limit

    @property
    def _orphaned(self) -> bool:
        """Whether the front end died with the call in it, and so never had what the engine went on to make."""
        return self.dead and self.root.end is None and self.root.pid in self.book.outputs

    @property
    def free(self) -> Mark | None:
        """How the engine ended the request; None also where that never reached the call's own process."""
        free = self.sequence.free if self.sequence else None
        lost = free is not None and self._orphaned and self.book.outputs[self.root.pid].after(free.t) is None
        return None if lost else free

    @property
    def streams(self) -> bool:
        """Whether the first text sent can only be this sequence's."""
        handler = self.root.handler
        return handler is not None and bool(handler.b) and handler.c == 1 and len(self.root.sequences) == 1

    @property
    def completed(self) -> int | None:
        """When the request came to its own end: the engine freed it, or the front end saw a stop string."""
        s = self.sequence
        if s is None:
            return None
        freed = self.free.t if self.free is not None and self.free.a not in CUT_SHORT else None
        done = min((t for t in (s.stopped, freed) if t is not None), default=None)
        return None if done is not None and self.cut is not None and done > self.cut else done

    @property
    def failed(self) -> bool:
        """Whether the call itself went wrong: an error status, a stream that says so, or an exception that got out."""
        root = self.root
        refused = root.status is not None and root.status.a >= 400
        return refused or root.failure is not None or (root.end is not None and bool(root.end.a))

    @property
    def cut(self) -> int | None:
        """When a call that was given up, or failed, was over: what the engine still did for it is no part of it."""
        root = self.root
        return self.end if root.end is not None and (root.disconnect is not None or self.failed) else None

    @property
    def dropped(self) -> int | None:
        """When the engine let go of a call that was given up, or else the call ended; None for any other call."""
        free = self.sequence.free if self.sequence else None
        return self.cut if self.cut is None or free is None else min(self.cut, free.t)

    @property
    def end(self) -> int | None:
        """When the client had everything, or the call was given up; None while it runs, or if nobody saw it end."""
        root = self.root
        if root.end is None or root.end_unseen or (root.direct and root.blind):
            return None
        if root.direct or root.disconnect is not None or root.end.a or not root.sent:
            return root.end.t
        return root.sent[-1]

    @property
    def generated(self) -> int | None:
        """Tokens the client got: the engine's count, unless a stop string cut it short. None where nobody counted."""
        s = self.sequence
        if s is None:
            return None
        if self.free is not None and s.stopped is None and self.free.b >= 0:
            return self.free.b
        return sum(turn.generated for turn in self.turns) if s.enqueued is not None else None


def own(sequence: Sequence) -> Sequence:
    """Without the engine's marks if some of them are older than it: where marks are lost, they can be a namesake's."""
    s, added = sequence, sequence.added.t if sequence.added else 0
    times = [*s.lookups[:1], *s.preempted[:1], *(m.t for m in (s.enqueued, s.free) if m is not None)]
    if all(time >= added for time in times):
        return s
    return replace(Sequence(s.number), **{name: getattr(s, name) for name in _FRONT_END})


_FRONT_END = ("root", "added", "internal_id", "sampling", "stopped", "finished", "aborted")
