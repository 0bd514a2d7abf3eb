"""The marks engine processes write: what each kind means and how it lies in 64 bytes.

A mark is ``(sequence, time_ns, key, a, b, c, d, kind, check)``. ``key`` is a 64-bit number: of a root (one call
of a client), of a sequence (one engine request) or of a step (one engine iteration). Times are monotonic ns.
Both ends of the record carry its sequence number, so that a reader can refuse a torn one.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import NamedTuple

RECORD = struct.Struct("@QqQqqqqII")
TEXT = struct.Struct("@QqQ32sII")
RECORD_SIZE = RECORD.size
TEXT_BYTES = 32
#: A string takes at most this many chained records: 512 bytes, the longest `tracestate` we keep.
TEXT_RECORDS = 16
#: ``kind`` of a text record: this bit, the field in bits 8-15, the chunk's position in bits 0-7.
TEXT_BIT = 1 << 30
#: Set in a text record's ``kind`` when more chunks follow.
TEXT_MORE = 1 << 29

# API process, keyed by root unless said otherwise.
ROOT = 1  # the ASGI (or offline) call: a, b = trace id halves; c = operation; d = where from
HANDLER = 2  # request handler entered: a = body bytes, b = stream, c = n, d = max tokens
RENDER = 3  # template rendering entered: a = messages
TOKENIZE = 4  # tokenisation entered: a = characters
TOKENIZE_RUN = 5  # a tokenizer thread took it up
TOKENIZED = 6  # tokenisation left: a = prompt tokens (-1: unknown)
ADD = 7  # handed to the engine: a = sequence number, b = prompt tokens (-1: unknown), d = index,
#          c = max tokens (0: as many as fit, -1: it is to generate none, but is pooled)
SAMPLING = 8  # key = sequence: a = temperature * 1e6, b = top_p * 1e6, c = top_k, d = grammar
OUTPUTS = 9  # key = 0: outputs processed: a = entered, b = left, c = engine's time stamp, d = rows
STOPPED = 10  # key = sequence: the front end saw a stop string
ABORTED = 11  # key = sequence: the front end aborted it
STATUS = 12  # response started: a = HTTP status
FIRST_TEXT = 13  # first generated text sent: t = send done
SENT = 14  # a body chunk sent: a = bytes
DISCONNECT = 15  # the client went away
END = 16  # the call returned: a = 1 when it raised, b = one of the two below, or 0
FAILED = 17  # a stream said that it has failed: a = the HTTP status it names
BACKGROUND = 18  # it is to be answered before the engine has done it
FINISHED = 19  # key = sequence: the front end took it for finished: a = finish code
#: What an END does not know: what became of the call in the engine, or when and how the call itself ended.
ENGINE_UNSEEN, END_UNSEEN = 1, 2
# Engine core, keyed by sequence unless said otherwise.
ARRIVE = 32  # request decoded
ENQUEUE = 33  # handed to the scheduler: a = waiting, b = running, c = 1 while its grammar is being compiled
LOOKUP = 34  # prefix cache look-up entered
BLOCKS = 35  # blocks assigned: a = blocks held
STEP = 36  # key = step: a = schedule entered, b = batch | tokens << 32, c = running | waiting << 32, d = KV usage ppm;
#            an empty batch once, when nothing runs any more
JOIN = 37  # scheduled with other than one token, or new: a = step, b = tokens, c = computed before,
#            d = new blocks | prefill << 32
LEAVE = 38  # no longer in the batch: a = step
UPDATE = 39  # key = step: a = update entered, b = rows
TOKENS = 40  # a = step, b = tokens accepted (only where it is not one)
PREEMPT = 41  # evicted
FREE = 42  # t = before blocks are given back: a = finish code, b = output tokens (-1: not counted),
#            c = blocks held | blocks kept << 32, d = blocks freed
# Worker, keyed by step: a = start, b = end, c = what that is the time of (LAUNCHED and ON_DEVICE below).
EXECUTE = 64
FORWARD = 65
LM_HEAD = 66
SAMPLE_CALL = 67
SAMPLE = 68
EMBEDDING = 69  # d = rows

#: A call's, while the device runs on after it has returned; the device's own work, by its events. 0: both at once.
LAUNCHED, ON_DEVICE = 1, 2

# Fields of text records. Key = root, sequence, or 0 for the process itself.
TRACEPARENT, TRACESTATE, CLIENT_ID, ROUTE, MODEL, EXTERNAL_ID, INTERNAL_ID, ENGINE, HOOK, ERROR = range(1, 11)
GPU = 11  # of a worker, once: "ENGINE RANK CARD NAME", where CARD is as the driver names it, or "-"

#: Where a root comes from: an HTTP call, an offline call, code that holds the engine itself, or an HTTP call that our
#: layer around the application has failed to watch, so that it is known from the engine's door on only.
HTTP, OFFLINE, DIRECT, UNWATCHED = range(4)
OPERATIONS = {
    1: "chat", 2: "text_completion", 3: "generate_content", 4: "embeddings",
    5: "pooling", 6: "classify", 7: "score", 8: "rerank",
}  # fmt: skip
FINISH = {1: "stop", 2: "length", 3: "abort", 4: "error", 5: "repetition", 0: "unknown"}
_FINISH_CODES = {name: code for code, name in FINISH.items()}


class Mark(NamedTuple):
    """A decoded mark; ``text`` is set for complete strings only (then ``kind`` is the field)."""

    t: int
    kind: int
    key: int
    a: int
    b: int
    c: int
    d: int


class TextMark(NamedTuple):
    """A complete string: ``field`` is one of the names above."""

    t: int
    field: int
    key: int
    text: str


def key_of(identifier: str) -> int:
    """The 64-bit number of a sequence, from the id the engine gives it.

    Every process derives it by itself, so nothing has to ride on the engine's messages. Ids live at the same time are
    distinct, because the engine refuses a duplicate.
    """
    return int.from_bytes(blake2b(identifier.encode(), digest_size=8).digest(), "little")


def finish_code(reason: object) -> int:
    """The code of an engine's finish reason, a member of an enumeration; 0 for none, or one that is not known."""
    return _FINISH_CODES.get(getattr(reason, "name", "").lower(), 0)


def class_of(error: BaseException) -> str:
    """All that is kept of an exception: messages of validation errors repeat what was sent."""
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def signed(number: int) -> int:
    """Fold an unsigned 64-bit number into the signed range a mark's payload has."""
    return number - (1 << 64) if number >= 1 << 63 else number


def unsigned(number: int) -> int:
    """The inverse of :func:`signed`."""
    return number & 0xFFFFFFFFFFFFFFFF
