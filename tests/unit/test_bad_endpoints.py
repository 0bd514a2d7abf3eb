"""`make bench ARGS="--only endpoints"` in small: bad endpoints below real collectors, and every span accounted for."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.endpoints import DYING, GOOD, KINDS
from benchmarks.row_endpoints import Fed, dropped, end, feeding
from tests.unit.helpers import wait_until

NAMES = ("good-grpc", "dying-http", "dying-grpc", "429-http", "429-grpc", "503-grpc", "hanging-grpc")


@pytest.fixture
def fed(base: Path, tmp_path: Path) -> list[Fed]:
    """Collectors with these endpoints, ended after each had spans to drop; those that die took some before."""
    # What fails is given up after a second, and the queue holds fifteen requests.
    patience = {"OTEL_EXPORTER_OTLP_TIMEOUT": "1", "OTEL_BSP_MAX_QUEUE_SIZE": "200"}
    with ExitStack() as stack:
        fed = [stack.enter_context(feeding(KINDS[name], tmp_path, 20.0, **patience)) for name in NAMES]
        for each in fed:
            if each.kind.behaviour in (GOOD, DYING):
                wait_until(lambda each=each: each.endpoint.taken, f"{each.kind.name} takes spans")
                each.endpoint.die() if each.kind.behaviour == DYING else None
        for each in fed:
            if each.kind.behaviour != GOOD:
                wait_until(lambda each=each: each.counted()[1], f"{each.kind.name}: the drops are on the metrics page")
            each.sample()
        end(fed)
        return fed


def test_every_span_is_taken_or_counted_and_the_exit_code_is_the_command_s(fed: list[Fed]) -> None:
    for each in fed:
        reasons = dropped(each.said)
        counted = each.endpoint.taken + sum(reasons.values())
        if each.kind.behaviour in (GOOD, DYING):
            # Taken as well as dropped: an endpoint that answers later than we wait for it.
            assert each.endpoint.taken > 0 and each.made <= counted, (each.kind.name, each.said)
        else:
            assert (each.endpoint.taken, each.made) == (0, counted), (each.kind.name, each.said)
        assert set(reasons) <= {"refused", "queue_full", "shutdown"}
        # One line each: where the metrics are, that it records, no traces taken, no metrics taken, what was dropped.
        assert len(each.said.splitlines()) <= 5, each.said
