"""The collector: how fast it can read and assemble, and what it takes beside a busy server."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from stagetrace.collect.loop import Collector
from stagetrace.collect.sink import StoreSink
from stagetrace.exporting import Sink
from stagetrace.store import StoreWriter

from .clocks import cpu_ns
from .decode_script import Server
from .figures import Options, Outcome, Progress
from .recording import private_session
from .stats import Spread, quantile

STREAMS, OUTPUT = 256, 256
#: Steps written between two polls of the fast row: half a ring full.
PORTION = 60
PORTIONS = 20
TOKENS_PER_S = 10_000
LIVE_S = 10
PAUSE_S = 0.02


def run(_options: Options, progress: Progress) -> Outcome:
    """First as fast as it can, then at the pace of a server."""
    outcome = Outcome()
    progress.of(PORTIONS + LIVE_S)
    progress.say("marks as fast as they can be read")
    rate, rates = _fast(progress)
    outcome.add(
        "marks read and assembled", "/s", Spread(rate, quantile(rates, 0.1), quantile(rates, 0.9), rate, rate), None,
        f"all in all; {STREAMS} streams of {OUTPUT} tokens; a mark per token, nine or more per step; no store",
    )  # fmt: skip
    progress.say(f"{TOKENS_PER_S:,} tokens/s for {LIVE_S} s")
    shares, tokens = _live(progress)
    outcome.add(
        f"CPU share at {TOKENS_PER_S:,} tokens/s", "%", Spread.of(shares), None,
        f"of one core, store included, one value per second; {tokens / LIVE_S:,.0f} tokens/s were written",
    )  # fmt: skip
    return outcome


def _fast(progress: Progress) -> tuple[float, list[float]]:
    """Marks per CPU second, in all and of each portion (those in which requests end take longer)."""
    rates: list[float] = []
    taken = used = 0
    with private_session() as directory:
        server, collector = Server(directory, STREAMS, OUTPUT), Collector(directory, [])
        for number in range(PORTIONS + 1):
            for _ in range(PORTION):
                server.step()
            before = cpu_ns()
            marks = collector.poll()
            spent = cpu_ns() - before
            if number:  # the first one finds the interpreter cold and 256 requests arriving at once
                rates.append(marks / spent * 1e9)
                taken, used = taken + marks, used + spent
                progress.tick()
        if collector.lost():
            raise RuntimeError(f"{collector.lost()} marks were overwritten: a portion is more than a ring holds")
    return taken / used * 1e9, rates


def _live(progress: Progress) -> tuple[list[float], int]:
    """CPU % of each second, and the tokens written; polled as often as `stagetrace run` polls."""
    shares: list[float] = []
    tokens = 0
    with private_session() as directory, tempfile.TemporaryDirectory(prefix="stagetrace-bench-") as folder:
        store = StoreSink(StoreWriter(Path(folder) / "store.db", 1 << 30), print)
        sinks: list[Sink] = [store]
        server, collector = Server(directory, STREAMS, OUTPUT), Collector(directory, sinks)
        began = time.perf_counter()
        for second in range(LIVE_S + 1):
            spent = 0
            while (passed := time.perf_counter() - began) < second + 1:
                while tokens < TOKENS_PER_S * passed:
                    tokens += server.step()
                before = cpu_ns()
                collector.poll()
                spent += cpu_ns() - before
                time.sleep(PAUSE_S)
            if second:
                shares.append(spent / 1e9 * 100)
                progress.tick()
        collector.close()
        store.close()
        lost, found = collector.lost(), collector.requests
    if lost or not found:
        raise RuntimeError(f"{found} requests assembled, {lost} marks lost")
    return shares, tokens * LIVE_S // (LIVE_S + 1)
