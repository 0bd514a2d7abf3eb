"""A server's worth of marks at a steady rate: ``stagetrace run -- python -m benchmarks.feed RATE TALLY``.

It records into the session it finds itself in until SIGTERM, lets whatever still runs come to its end, and exits with
``EXIT_CODE``.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from stagetrace import session

from .decode_script import Server
from .tally import Tally

STREAMS = OUTPUT = 24
#: Of a request that went through every stage: a root and twelve.
SPANS = 13
EXIT_CODE = 9
#: Requests that have ended, and when (``time.monotonic_ns``) the last thing was done.
NUMBERS = ("requests", "left_ns")


def main(rate: float, path: str) -> int:
    """Feed ``rate`` requests a second, or as many as there is CPU for."""
    tally = Tally(Path(path), *NUMBERS)
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    server = Server(Path(os.environ[session.ENV]), STREAMS, OUTPUT)
    pause = STREAMS / OUTPUT / rate
    due = time.monotonic()
    while not asked:
        server.step()
        tally["requests"] = server.ended
        # Like an engine that got no CPU, it makes up for nothing: what was not done in time is not done faster later.
        due = max(due + pause, time.monotonic() - pause)
        time.sleep(max(due - time.monotonic(), 0.0))
    server.drain()
    tally["requests"] = server.ended
    tally["left_ns"] = time.monotonic_ns()
    return EXIT_CODE


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2]))
