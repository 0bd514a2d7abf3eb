"""Numbers and roots: distinct whatever threads do, and per call whatever tasks do. (Forks: test_recorder.py.)"""

from __future__ import annotations

import asyncio
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from stagetrace import context
from stagetrace.marks import key_of, signed, unsigned
from tests.unit.helpers import python


def test_numbers_fit_64_bits_and_are_never_0(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = [context.number() for _ in range(1000)]
    assert len(set(numbers)) == 1000
    assert all(0 < number < 1 << 64 for number in numbers)
    # With this salt the first number would be 0.
    monkeypatch.setattr(context, "_issued", iter([1, 2]))
    monkeypatch.setattr(context, "_salt", -0x9E3779B97F4A7C15)
    assert context.number() != 0


def test_threads_get_distinct_numbers() -> None:
    """Counting with ``+= 1`` hands the same number out twice now and then."""
    begin = threading.Barrier(8)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def take(_: int) -> list[int]:
        begin.wait(60)
        return [context.number() for _ in range(20_000)]

    try:
        with ThreadPoolExecutor(8) as pool:
            numbers = [number for some in pool.map(take, range(8)) for number in some]
    finally:
        sys.setswitchinterval(before)
    assert len(set(numbers)) == len(numbers) == 160_000


def test_processes_get_distinct_numbers() -> None:
    code = "from stagetrace import context; print(*[context.number() for _ in range(1000)])"
    numbers = [number for _ in range(2) for number in python(code).stdout.split()]
    assert len(set(numbers)) == len(numbers) == 2000


def test_roots_have_ids_of_their_own() -> None:
    roots = [context.new_root() for _ in range(100)]
    assert len({root.number for root in roots}) == 100
    assert len({(root.trace_high, root.trace_low) for root in roots}) == 100
    assert all(root.trace_high or root.trace_low for root in roots)
    roots[0].sequences.append(1)
    assert roots[1].sequences == []


def test_a_task_changes_what_its_parent_sees_and_nothing_else() -> None:
    """A web framework runs handler and response in tasks of their own, and many calls at the same time."""

    async def handler() -> None:
        root = context.current.get()
        assert root
        root.received_bytes += 5
        await asyncio.sleep(0)

    async def call() -> int:
        root = context.new_root()
        context.current.set(root)
        await asyncio.create_task(handler())
        await asyncio.to_thread(lambda: context.current.get().sequences.append(1))  # type: ignore[union-attr]
        assert root.sequences == [1]
        return root.received_bytes

    async def calls() -> list[int]:
        return await asyncio.gather(*[asyncio.create_task(call()) for _ in range(20)])

    assert asyncio.run(calls()) == [5] * 20
    assert context.current.get() is None


@pytest.mark.parametrize("number", [0, 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_signed_and_unsigned(number: int) -> None:
    assert -(1 << 63) <= signed(number) < 1 << 63
    assert unsigned(signed(number)) == number


def test_sequences_are_known_by_their_ids_everywhere() -> None:
    """Each process derives the number by itself: it must not depend on the process."""
    code = "from stagetrace.marks import key_of; print(key_of('chatcmpl-1'), key_of(''))"
    both = {python(code, PYTHONHASHSEED=seed).stdout for seed in ("1", "2")}
    assert both == {f"{key_of('chatcmpl-1')} {key_of('')}\n"}
