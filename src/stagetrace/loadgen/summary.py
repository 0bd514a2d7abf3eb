"""What a load came to, and the client's own clock in a file: for cross-checks with what the server recorded."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .. import outfile
from ..faults import Fault
from ..stats import quantiles
from .run import Outcome
from .settings import Settings

SCHEMA = 1
#: How a client file begins; nothing else is ever overwritten.
_HEAD = '{"schema": 1, "kind": "load"'


def summary(outcome: Outcome) -> dict[str, Any]:
    """Rates, concurrency and times (ms) as the client saw them; times are those of answered requests."""
    done = [e for e in outcome.exchanges if e.ok]
    sent = [e for e in outcome.exchanges if e.sent_ns is not None and e.end_ns is not None]
    span = max((e.end_ns or 0 for e in sent), default=0) - min((e.sent_ns or 0 for e in sent), default=0)
    window_s = span / 1e9 or None
    tokens = [e.output_tokens for e in done if e.output_tokens is not None]
    gaps = [(b - a) / 1e6 for e in done for a, b in zip(e.chunk_ns, e.chunk_ns[1:], strict=False)]
    late = [(e.sent_ns - e.due_ns) / 1e6 for e in sent if e.due_ns is not None and e.sent_ns is not None]
    return {
        "requests": len(done),
        "failed": len(outcome.exchanges) - len(done),
        "errors": dict(Counter(e.error or "unknown" for e in outcome.exchanges if not e.ok)),
        "window_s": window_s,
        "request_rate": len(sent) / window_s if window_s else None,
        "concurrency": sum(e.e2e_ms or 0.0 for e in sent) / 1e3 / window_s if window_s else None,
        "prefix_caching": outcome.served.prefix_caching,
        "prompt_tokens": quantiles(e.prompt_tokens for e in done),
        "output_tokens": quantiles(tokens),
        "output_tokens_per_s": sum(tokens) / window_s if window_s and tokens else None,
        "ttft_ms": quantiles(e.ttft_ms for e in done),
        "chunk_gap_ms": quantiles(gaps),
        "e2e_ms": quantiles(e.e2e_ms for e in done),
        #: Sent later than due, in an open loop: the client's own delay.
        "late_ms": quantiles(late),
    }


def document(settings: Settings, outcome: Outcome) -> dict[str, Any]:
    """The client file. Times are ``time.monotonic_ns`` of the client; ``clock`` is one moment on both clocks."""
    return {
        "schema": SCHEMA,
        "kind": "load",
        "url": settings.place,
        "path": settings.path,
        "model": outcome.served.model,
        "loop": {"rate": settings.rate} if settings.rate is not None else {"concurrency": settings.concurrency or 1},
        "prompt_tokens": settings.prompt_tokens,
        "output_tokens": settings.output_tokens,
        "shared_prefix": settings.shared_prefix,
        "seed": settings.seed,
        "stream": settings.stream,
        # Prompts are characters, cut by this; what they came to in tokens is each request's usage.
        "calibration": asdict(outcome.calibration),
        "clock": {"monotonic_ns": outcome.clock[0], "unix_ns": outcome.clock[1]},
        "interrupted": outcome.interrupted,
        "summary": summary(outcome),
        "warmup": [exchange.to_json() for exchange in outcome.before],
        "requests": [exchange.to_json() for exchange in outcome.exchanges],
    }


def check_output(path: Path) -> None:
    """Fault, before anything is sent, if the client file could not be written there, or something else is there."""
    try:
        folder = outfile.folder(path)
        if folder and not (folder.is_dir() and os.access(folder, os.W_OK)):
            raise Fault(f"-o {path}: {folder} is no directory that can be written")
        if path.is_dir():
            raise Fault(f"-o {path}: that is a directory; name a file")
        outfile.spare("-o", path, lambda there: there.read_bytes()[: len(_HEAD)] == _HEAD.encode())
    except OSError as error:
        raise Fault(f"-o {path}: {error.strerror}; name another file") from None


def write(path: Path, settings: Settings, outcome: Outcome) -> None:
    """Write the client file, whole or not at all."""
    text = json.dumps(document(settings, outcome), allow_nan=False)
    try:
        with outfile.writing(path) as file:
            file.write(text + "\n")
    except BrokenPipeError:
        raise  # whoever reads has enough
    except OSError as error:
        raise Fault(f"-o {path}: {error.strerror}") from None
