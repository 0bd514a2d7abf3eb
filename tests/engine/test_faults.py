"""A real server made slow at each of fifteen known places: the time is found in the stage that place belongs to.

The short form of `make faults`: one size, few pairs, and margins that a busy machine keeps. A hook that has moved puts
the whole delay into another stage, which is far outside them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stagetrace.stages import STAGES
from tests.faults.measure import FAIL, Limits, Plan, measure
from tests.faults.plugin.stagetrace_faults import places
from tests.faults.server import FaultyServer, serve

SIZE_MS = 60.0
#: Half of it may be elsewhere: three pairs on a machine full of other work.
PLAN = Plan(pairs=3, rounds=2, limits=Limits(own=0.25, elsewhere=0.5))


@pytest.fixture(scope="module")
def server(engine: Any, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyServer]:
    with serve(engine, model, tmp_path_factory.mktemp("faults")) as live:
        for tokens in (1, 2, 20, 2):
            live.send("warm", 60, tokens)
        yield live


def test_there_is_a_place_in_every_stage() -> None:
    assert set(places.STAGES) == {stage.key for stage in STAGES}
    assert set(places.GAPS) == {"engine_input", "dispatch", "result"}


@pytest.mark.parametrize("name", [*places.STAGES, *places.GAPS])
def test_a_delay_lands_where_it_belongs(name: str, server: FaultyServer) -> None:
    # A hook that has moved fails each time; a machine that is short of CPU time does not.
    for _ in range(3):
        row = measure(server, name, SIZE_MS, PLAN, lambda: None)
        if row.verdict != FAIL:
            return
    changes = {stage: round(change.value, 2) for stage, change in row.changes.items()}
    pytest.fail(f"{row.judged()}: injected {row.injected.value}, client {row.client.value}, stages {changes}")
