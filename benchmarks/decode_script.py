"""A server's marks without a server: a continuous batch of streams, written by real recorders into real rings."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from stagetrace import marks
from stagetrace.context import number
from stagetrace.marks import key_of, signed
from stagetrace.recorder import Recorder

now = time.monotonic_ns
PROMPT = 500
BODY = 250
SETTINGS = {
    "engine": "scripted", "model": "scripted", "block_size": 16, "kv_blocks": 65536, "max_num_seqs": 256,
    "max_num_batched_tokens": 8192, "vocabulary": 32000, "max_model_len": 4096,
}  # fmt: skip


@dataclass
class Stream:
    """One request: its root, its sequence number, and the step after which it ends."""

    root: int
    sequence: int
    last_step: int


class Server:
    """Writes what the hooks of an API server, an engine core and a worker would write."""

    def __init__(self, directory: Path, streams: int, output: int) -> None:
        self.api, self.core, self.worker = Recorder(directory), Recorder(directory), Recorder(directory)
        self.live: deque[Stream] = deque()
        self._engine = number() & 0x7FFFFFFF_00000000
        self._count = 0
        self._output = output
        #: Requests that came to their end.
        self.ended = 0
        for key, value in SETTINGS.items():
            self.core.text(marks.ENGINE, 0, f"{key}={value}")
        # Lengths that differ evenly: from the start about as many end in every step as will go on doing. Two tokens
        # at least: with one there is no decode, and so one stage fewer.
        self._joining = [self._arrive(2 + output * n // streams) for n in range(streams)]
        #: Who ran its prompt in the last step, and so goes on with one token.
        self._prefilled: list[Stream] = []

    def drain(self) -> None:
        """Let everybody come to the end, with nobody to replace them."""
        while self._joining or self.live:
            self.step(replace=False)

    def step(self, replace: bool = True) -> int:
        """One engine step: whoever ended is replaced; return the tokens made."""
        self._count += 1
        step = self._engine + self._count
        entered = now()
        joined, self._joining = self._joining, []
        for stream in joined:
            self.core.mark(marks.LOOKUP, stream.sequence)
            self.core.mark(marks.BLOCKS, stream.sequence, PROMPT // 16 + 1)
            self.live.append(stream)
        self._compose(step, entered, joined)
        self._work(step)
        ended = [stream for stream in self.live if stream.last_step <= self._count]
        self._update(step, ended)
        self._send(joined)
        for stream in ended:
            self.live.remove(stream)
            self.core.mark(marks.LEAVE, stream.sequence, step + 1)
            self.api.mark(marks.SENT, stream.root, 14)
            self.api.mark(marks.END, stream.root)
        self.ended += len(ended)
        self._joining = [self._arrive(self._output) for _ in ended if replace]
        return len(self.live) + len(ended)

    def _arrive(self, output: int) -> Stream:
        root, internal = number(), f"chatcmpl-{number():032x}-{number():08x}"
        sequence = key_of(internal)
        mark, text = self.api.mark, self.api.text
        mark(marks.ROOT, root, signed(number()), signed(number()), 1, marks.HTTP)
        text(marks.ROUTE, root, "/v1/chat/completions")
        mark(marks.HANDLER, root, 2000, 1, 1, output)
        mark(marks.RENDER, root, 1)
        mark(marks.TOKENIZE, root, 1900)
        mark(marks.TOKENIZE_RUN, root)
        mark(marks.TOKENIZED, root, PROMPT)
        mark(marks.ADD, root, signed(sequence), PROMPT, output, 0)
        text(marks.INTERNAL_ID, sequence, internal)
        text(marks.EXTERNAL_ID, root, internal[:-9])
        mark(marks.SAMPLING, sequence, 1_000_000, 1_000_000, 0, 0)
        mark(marks.STATUS, root, 200)
        self.core.mark(marks.ARRIVE, sequence)
        self.core.mark(marks.ENQUEUE, sequence, 1, len(self.live))
        return Stream(root, sequence, self._count + output)

    def _compose(self, step: int, entered: int, joined: list[Stream]) -> None:
        size = len(self.live)
        tokens = size + len(joined) * (PROMPT - 1)
        self.core.mark(marks.STEP, step, entered, size | tokens << 32, size, 500_000)
        for stream in joined:
            self.core.mark(marks.JOIN, stream.sequence, step, PROMPT, 0, PROMPT // 16 + 1 | 1 << 32)
        for stream in self._prefilled:
            self.core.mark(marks.JOIN, stream.sequence, step, 1, PROMPT, 0)
        self._prefilled = [stream for stream in joined if stream.last_step > self._count]

    def _work(self, step: int) -> None:
        mark, at = self.worker.mark, now()
        mark(marks.EMBEDDING, step, at + 10, at + 20, 0, len(self.live))
        mark(marks.FORWARD, step, at + 10, at + 200)
        mark(marks.LM_HEAD, step, at + 200, at + 220)
        mark(marks.EXECUTE, step, at, at + 230)
        mark(marks.SAMPLE, step, at + 240, at + 250)
        mark(marks.SAMPLE_CALL, step, at + 235, at + 260)

    def _update(self, step: int, ended: list[Stream]) -> None:
        entered = now()
        for stream in ended:
            self.core.mark(marks.FREE, stream.sequence, 2, self._output, 40 | 30 << 32, 40)
        self.core.mark(marks.UPDATE, step, entered, len(self.live))

    def _send(self, joined: list[Stream]) -> None:
        at = now()
        self.api.mark(marks.OUTPUTS, 0, at, now(), at, len(self.live))
        for stream in joined:
            self.api.mark(marks.FIRST_TEXT, stream.root)
        sent = self.api.mark
        for stream in self.live:
            sent(marks.SENT, stream.root, BODY)
