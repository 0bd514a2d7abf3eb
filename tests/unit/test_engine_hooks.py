"""What the scheduler's hook writes of a step, on a scheduler that is just as much of one as it looks at."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from stagetrace import marks
from stagetrace_vllm import engine_hooks


class Scheduler:
    """Composes what it is told to."""

    def __init__(self) -> None:
        self._stagetrace = engine_hooks.Batch()
        self.requests: dict[str, Any] = {}
        self.counts = (0, 0)
        self.kv_cache_manager = SimpleNamespace(usage=0.0)

    def get_request_counts(self) -> tuple[int, int]:
        return self.counts

    def step(self, *running: str, waiting: int = 0, usage: float = 0.0, held: int = 0) -> Any:
        """A step with ``running`` in it, one token each; ``held`` more run, and have nothing to compute."""
        self.counts, self.kv_cache_manager.usage = (len(running) + held, waiting), usage
        for name in running:
            self.requests[name] = SimpleNamespace(num_computed_tokens=9, num_prompt_tokens=4)
        output = SimpleNamespace(
            num_scheduled_tokens=dict.fromkeys(running, 1), total_num_scheduled_tokens=len(running),
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(req_ids=list(running), new_block_ids=[None] * len(running)),
        )  # fmt: skip
        engine_hooks.scheduled(0, self, output)
        return output


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    monkeypatch.setattr(engine_hooks.recorder, "mark", lambda *mark: found.append(mark))
    return found


def of_kind(kind: int, written: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return [mark for mark in written if mark[0] == kind]


def test_an_engine_that_comes_to_rest_says_so_once(written: list[tuple[int, ...]]) -> None:
    scheduler = Scheduler()
    scheduler.step("a", "b", waiting=3, usage=0.5)
    written.clear()
    first, *more = [scheduler.step() for _ in range(3)]
    (step,) = of_kind(marks.STEP, written)
    assert step[3:] == (0, 0, 0), "an empty batch, nobody running or waiting, nothing in the cache"
    assert first._stagetrace_step == step[1] and not any(hasattr(output, "_stagetrace_step") for output in more)
    assert len(of_kind(marks.LEAVE, written)) == 2
    written.clear()
    assert scheduler.step("c")._stagetrace_step == step[1] + 1
    scheduler.step()
    assert [mark[3] & 0xFFFFFFFF for mark in of_kind(marks.STEP, written)] == [1, 0]


def test_while_tokens_are_on_their_way_an_empty_step_says_nothing(written: list[tuple[int, ...]]) -> None:
    """Asynchronous scheduling composes ahead: whoever awaits his last token runs, and is not in the batch."""
    scheduler = Scheduler()
    scheduler.step("a")
    written.clear()
    scheduler.step(held=1, usage=0.5)
    assert written == []


def test_at_rest_only_what_changes_is_written(written: list[tuple[int, ...]]) -> None:
    """A request that waits for its grammar, or for blocks from elsewhere, keeps the engine turning without work."""
    scheduler = Scheduler()
    for waiting, usage in ((1, 0.0), (1, 0.0), (2, 0.0), (2, 0.25), (2, 0.25), (0, 0.0)):
        scheduler.step(waiting=waiting, usage=usage)
    states = [(mark[4] >> 32, mark[5]) for mark in of_kind(marks.STEP, written)]
    assert states == [(1, 0), (2, 0), (2, 250_000), (0, 0)]


def test_a_request_ends_when_its_blocks_begin_to_go_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Returning them is teardown's work, not decode's."""
    written: list[dict[str, int]] = []
    monkeypatch.setattr(engine_hooks.recorder, "mark", lambda *mark, **more: written.append(more))
    monkeypatch.setattr(engine_hooks, "now", iter((100, 200)).__next__)
    free = iter((5, 8))
    scheduler = SimpleNamespace(kv_cache_manager=SimpleNamespace(
        coordinator=SimpleNamespace(get_blocks=lambda _: [[1, 2, 3]]), enable_caching=True,
        block_pool=SimpleNamespace(get_num_free_blocks=lambda: next(free)),
    ))  # fmt: skip
    request = SimpleNamespace(request_id="a", block_hashes=[1], num_output_tokens=7, get_finished_reason=lambda: None)
    engine_hooks.freed(engine_hooks.freeing(scheduler, request), scheduler, None)
    assert written == [{"t": 100}]
