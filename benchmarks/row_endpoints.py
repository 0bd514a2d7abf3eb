"""Collectors under load whose OTLP endpoints are bad in every way there is, beside one whose endpoint is good."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

from . import feed
from .endpoints import DYING, KINDS, Endpoint, Kind, endpoint
from .figures import Options, Outcome, Progress
from .stats import Spread, median
from .tally import Tally

#: One of each behaviour, the protocols mixed, unless told otherwise; and what the others are compared with.
USUAL = ("dead-grpc", "dying-http", "hanging-grpc", "429-http", "503-grpc")
CONTROL = "good-http"
#: Requests per second that each collector is fed: of a busy server.
RATE = 30.0
SAMPLE_S = 5.0
#: The run's second half is looked at in so many parts.
PARTS = 5
#: Those that are to die do so after this part of the run: by its second half their collectors' queues are full.
DEATH = 1 / 3
#: A collector's own queue, the message under way, and one more for what changes while it is looked at.
HELD_LIMIT = 16_384 + 2 * 512
EXIT_LIMIT_S, GROWTH_LIMIT_MB, ABOVE_LIMIT_MB = 5.0, 0.5, 64.0
PATIENCE_S = 60.0
_DROPPED = re.compile(r"^stagetrace_spans_dropped_total\{.*?\} (\S+)$", re.MULTILINE)
_REQUESTS = re.compile(r"^gen_ai_server_request_duration_seconds_count\{.*?\} (\S+)$", re.MULTILINE)
_SAID = re.compile(r"(\d+) spans were not exported \((.*)\)")

NOTE = (
    "Every collector is a real `stagetrace run` with a scripted engine below it, which writes real marks into real "
    "rings; all of them run side by side. Spans unaccounted for: made, less those the endpoint itself says it took, "
    "less those that `stagetrace run` says at the end it dropped. Held: what its metrics page counts as requests, 13 "
    "spans each, less those taken, less those the page counts as dropped; looked up every 5 s. They are ended one "
    "after the other, the rest being fed meanwhile."
)


@dataclass(frozen=True)
class Sample:
    """What a collector was like at one moment."""

    at_s: float
    rss_mb: float
    threads: int
    held: int


@dataclass
class Fed:
    """One `stagetrace run` that is fed marks, and its endpoint."""

    kind: Kind
    endpoint: Endpoint
    process: subprocess.Popen[bytes]
    log: Path
    tally: Tally
    began: float = field(default_factory=time.monotonic)
    samples: list[Sample] = field(default_factory=list)
    cpu_s: float = 0.0
    exit_s: float = 0.0
    #: How much of that its main thread was ready and got no CPU.
    starved_s: float = 0.0

    @property
    def made(self) -> int:
        """Spans that were made, or are just being made."""
        return self.tally["requests"] * feed.SPANS

    def sample(self) -> None:
        """Note what it is like now."""
        if self.process.poll() is not None:
            raise RuntimeError(f"{self.kind.name}: ended by itself with {self.process.returncode}:\n{self.said}")
        status = dict(line.split(":", 1) for line in self._proc("status").splitlines())
        # In this order, so that what changes meanwhile counts as held.
        taken = self.endpoint.taken
        requests, lost = self.counted()
        self.samples.append(
            Sample(
                time.monotonic() - self.began, int(status["VmRSS"].split()[0]) / 1024, int(status["Threads"]),
                requests * feed.SPANS - taken - lost,
            )
        )  # fmt: skip
        used = self._proc("stat").rpartition(")")[2].split()
        self.cpu_s = (int(used[11]) + int(used[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def said(self) -> str:
        """What it wrote to its terminal."""
        return self.log.read_text(errors="replace")

    def waited_s(self) -> float:
        """How long its main thread has been ready and waiting for a CPU."""
        return int(self._proc("schedstat").split()[1]) / 1e9

    def _proc(self, name: str) -> str:
        return Path("/proc", str(self.process.pid), name).read_text()

    def counted(self) -> tuple[int, int]:
        """Requests so far, and spans dropped so far, as its page for Prometheus says."""
        found = re.search(r"http://\S+/metrics", self.said)
        if not found:
            return 0, 0
        with urllib.request.urlopen(found[0], timeout=PATIENCE_S) as answer:
            page = answer.read().decode()
        requests, lost = (sum(map(float, pattern.findall(page))) for pattern in (_REQUESTS, _DROPPED))
        return round(requests), round(lost)


def run(options: Options, progress: Progress) -> Outcome:
    """Feed all of them for ``options.minutes``, then end one after the other."""
    kinds = [KINDS[name] for name in dict.fromkeys((CONTROL, *(options.endpoints or USUAL)))]
    total_s = options.minutes * 60
    progress.of(round(total_s / SAMPLE_S))
    progress.say(f"{len(kinds)} collectors at {RATE:.0f} requests/s each")
    with tempfile.TemporaryDirectory(prefix="stagetrace-bench-") as folder, ExitStack() as stack:
        fed = [stack.enter_context(feeding(kind, Path(folder))) for kind in kinds]
        began = time.monotonic()
        while (passed := time.monotonic() - began) < total_s:
            time.sleep(SAMPLE_S - passed % SAMPLE_S)
            for each in fed:
                each.sample()
                if each.kind.behaviour == DYING and passed > total_s * DEATH:
                    each.endpoint.die()
            progress.tick()
        for each in fed:
            end([each])
        return summarise(fed, options.minutes)


@contextmanager
def feeding(kind: Kind, folder: Path, rate: float = RATE, **variables: str) -> Iterator[Fed]:
    """A collector that is fed until it is told to end; ``variables`` are for its environment."""
    with endpoint(kind, folder) as place:
        log, tally = folder / f"log-{kind.name}", Tally(folder / f"feed-{kind.name}", *feed.NUMBERS)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
        command = [
            sys.executable, "-m", "stagetrace", "run", "--no-store", "--otlp", place.url, "--prometheus", "127.0.0.1:0",
            "--", sys.executable, "-m", "benchmarks.feed", str(rate), str(tally.path),
        ]  # fmt: skip
        environment |= {**place.environment(), **variables}
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, env=environment, cwd=Path(__file__).resolve().parents[1],
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, preexec_fn=os.setpgrp,
            )  # fmt: skip
        try:
            yield Fed(kind, place, process, log, tally)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def end(fed: Sequence[Fed]) -> None:
    """Tell them to end, and wait until they have. ``exit_s`` is exact for the first of them."""
    for each in fed:
        # Once: a second signal may meet an interpreter that has taken its handlers down already.
        each.process.terminate()
    for each in fed:
        _ended(each)


def _ended(each: Fed) -> None:
    """Wait for it; RuntimeError if it is still there after a while, or its exit code is not its server's."""
    until = time.monotonic() + PATIENCE_S
    before = starved = 0.0
    while each.process.poll() is None:
        if time.monotonic() > until:
            raise RuntimeError(f"{each.kind.name}: still there after {PATIENCE_S:.0f} s")
        with suppress(OSError):  # it ends between two looks
            starved = each.waited_s()
        if not each.tally["left_ns"]:
            before = starved
        time.sleep(0.005)
    each.exit_s = (time.monotonic_ns() - each.tally["left_ns"]) / 1e9
    each.starved_s = starved - before
    if each.process.returncode != feed.EXIT_CODE:
        raise RuntimeError(f"{each.kind.name}: exit code {each.process.returncode}:\n{each.said}")


def dropped(said: str) -> dict[str, int]:
    """Spans by reason, from what `stagetrace run` said at the end."""
    found = _SAID.search(said)
    if not found:
        return {}
    reasons = {reason: int(count) for reason, _, count in (part.rpartition(" ") for part in found[2].split(", "))}
    if sum(reasons.values()) != int(found[1]):
        raise RuntimeError(f"the reasons do not add up: {found[0]}")
    return reasons


def summarise(fed: list[Fed], minutes: float) -> Outcome:
    """What each was like, and what the others were like beside the control."""
    outcome = Outcome(notes=[NOTE, f"load average after the run: {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs"])
    control = max(sample.rss_mb for sample in fed[0].samples)
    for each in fed:
        name, reasons = each.kind.name, dropped(each.said)
        parts = ", ".join(f"{reason} {count:,}" for reason, count in sorted(reasons.items()))
        about = f"{each.made:,} made, {each.endpoint.taken:,} taken, {sum(reasons.values()):,} dropped ({parts or '-'})"
        missing = each.made - each.endpoint.taken - sum(reasons.values())
        outcome.add(f"{name}: spans unaccounted for", "count", Spread.of([abs(missing)]), 0, about)
        held = [sample.held for sample in each.samples]
        outcome.add(f"{name}: spans held at most", "count", Spread.of([max(held)]), HELD_LIMIT)
        resident = [sample.rss_mb for sample in each.samples]
        tenths = [*(resident[len(resident) * n // 10] for n in range(10)), resident[-1]]
        course = f"MB by tenths of the run: {' '.join(f'{value:.0f}' for value in tenths)}"
        grown = Spread.of(growth(each.samples, minutes))
        outcome.add(f"{name}: RSS growth, second half", "MB/min", grown, GROWTH_LIMIT_MB, course)
        if each is not fed[0]:
            above = Spread.of([max(resident) - control])
            outcome.add(f"{name}: RSS at most, above the control's", "MB", above, ABOVE_LIMIT_MB)
        share = each.cpu_s / each.samples[-1].at_s * 100
        threads = f"of one core; {max(sample.threads for sample in each.samples)} threads at most"
        outcome.add(f"{name}: CPU share", "%", Spread.of([share]), None, threads)
        starved = f"{each.starved_s:.2f} s of it ready, and waiting for a CPU"
        outcome.add(f"{name}: exit after its server's", "s", Spread.of([each.exit_s]), EXIT_LIMIT_S, starved)
    return outcome


def growth(samples: list[Sample], minutes: float) -> list[float]:
    """MB per minute in the run's second half: the slope from each part of it to each later one, by their medians."""
    length = minutes / 2 / PARTS
    parts: dict[int, list[float]] = {}
    for sample in samples:
        if sample.at_s >= minutes * 30:
            parts.setdefault(int((sample.at_s / 60 - minutes / 2) / length), []).append(sample.rss_mb)
    medians = [(number, median(values)) for number, values in sorted(parts.items()) if number < PARTS]
    return [(b - a) / ((m - n) * length) for (n, a), (m, b) in combinations(medians, 2)]
