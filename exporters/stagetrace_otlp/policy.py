"""Which traces are exported. Recording, store and metrics see all of them whatever this says."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from stagetrace.exporting import RequestRecord, chosen, percentile

#: A request is slow beyond this percentile of the last thousand; with fewer than a hundred nobody can tell.
SLOW_PERCENTILE = 99.0
_ENOUGH = 100


class Policy:
    """The caller decides where there is one; else the sampler, then errors (not 4xx) and slow requests are kept."""

    def __init__(self, environment: Mapping[str, str], ratio: float | None = None) -> None:
        """``ratio`` (``--sample``) goes before ``OTEL_TRACES_SAMPLER``. ValueError with one line for a bad value."""
        if ratio is not None and not 0 <= ratio <= 1:
            raise ValueError(f"--sample {ratio} is not a number from 0 to 1")
        #: Of the traces without a caller, those exported whatever becomes of the request.
        self.ratio = ratio if ratio is not None else _from_environment(environment)
        wanted = environment.get("STAGETRACE_EXPORT_UNSAMPLED", "")
        self._unsampled = {word.strip() for word in wanted.split(",") if word.strip()}
        if self._unsampled - {"errors", "slow"}:
            raise ValueError(f"STAGETRACE_EXPORT_UNSAMPLED={wanted}: give errors, slow, or both with a comma")
        self._recent: deque[float] = deque(maxlen=1000)

    def exports(self, records: Sequence[RequestRecord]) -> bool:
        """Whether the call that ``records`` belong to is to be exported."""
        first = records[0]
        # Not what the request itself was to blame for: one client's nonsense would undo the sampling of all.
        failed = any(record.status == "error" for record in records) and not refused(records)
        slow = self._slow(first)
        if first.caller_sampled is True:
            return True
        if first.caller_sampled is False:
            return (failed and "errors" in self._unsampled) or (slow and "slow" in self._unsampled)
        return chosen(first.trace_id, self.ratio) or (self.ratio > 0 and (failed or slow))

    def _slow(self, record: RequestRecord) -> bool:
        if record.e2e_ms is None:
            return False
        limit = percentile(self._recent, SLOW_PERCENTILE) if len(self._recent) >= _ENOUGH else None
        self._recent.append(record.e2e_ms)
        return limit is not None and record.e2e_ms > limit


def refused(records: Sequence[RequestRecord]) -> bool:
    """Whether the server answered that the request was at fault (4xx)."""
    return 400 <= (records[0].http_status or 0) < 500


def _from_environment(environment: Mapping[str, str]) -> float:
    """The ratio that ``OTEL_TRACES_SAMPLER`` and ``OTEL_TRACES_SAMPLER_ARG`` stand for where there is no caller."""
    name = environment.get("OTEL_TRACES_SAMPLER", "parentbased_always_on").strip().lower()
    plain = name.removeprefix("parentbased_")
    if plain in ("always_on", "always_off"):
        return float(plain == "always_on")
    if plain != "traceidratio":
        raise ValueError(f"OTEL_TRACES_SAMPLER={name} is not known; use always_on, always_off or traceidratio")
    text = environment.get("OTEL_TRACES_SAMPLER_ARG", "1")
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    if not 0 <= ratio <= 1:
        raise ValueError(f"OTEL_TRACES_SAMPLER_ARG={text} is not a number from 0 to 1")
    return ratio
