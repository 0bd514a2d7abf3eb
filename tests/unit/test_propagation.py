"""``traceparent``: the cases of the W3C's own test suite, and everything that is not one."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stagetrace.propagation import Parent, parse

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GOOD = f"00-{TRACE}-{SPAN}-01"


@pytest.mark.parametrize(
    ("header", "sampled"),
    [
        (GOOD, True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-03", True),
        (f"00-{TRACE}-{SPAN}-ff", True),
        (f"00-{TRACE}-{SPAN}-fe", False),
        (f" \t{GOOD}\t ", True),
        # Later versions may say more, after a dash.
        (f"cc-{TRACE}-{SPAN}-01", True),
        (f"cc-{TRACE}-{SPAN}-00-what-the-future-will-be-like", False),
        (f"01-{TRACE}-{SPAN}-01-", True),
    ],
)
def test_well_formed(header: str, sampled: bool) -> None:
    assert parse(header) == Parent(TRACE, SPAN, sampled)


@pytest.mark.parametrize(
    "header",
    [
        "", "-", "---", "00", GOOD[:-1], GOOD[1:], f"0{GOOD}", f"{GOOD}0", f"{GOOD},{GOOD}", f"{GOOD} {GOOD}",
        f"ff-{TRACE}-{SPAN}-01",  # version ff is forbidden
        f"0-{TRACE}-{SPAN}-01", f"000-{TRACE}-{SPAN}-01", f".0-{TRACE}-{SPAN}-01", f"0x-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-", f"00-{TRACE}-{SPAN}-01-more", f"00-{TRACE}-{SPAN}-01.",  # version 00 has four parts
        f"cc-{TRACE}-{SPAN}-01.what-the-future-will-be-like", f"cc-{TRACE}-{SPAN}-01x", f"cc-{TRACE}-{SPAN}",
        f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01",  # all-zero ids
        f"00-{TRACE.upper()}-{SPAN}-01", f"00-{TRACE}-{SPAN.upper()}-01", f"00-{TRACE}-{SPAN}-0A",
        f"CC-{TRACE}-{SPAN}-01",
        f"00-{TRACE[:-1]}-{SPAN}-01", f"00-{TRACE}0-{SPAN}-01", f"00-{TRACE}-{SPAN[:-1]}-01", f"00-{TRACE}-{SPAN}0-01",
        f"00-{TRACE[:-1]}g-{SPAN}-01", f"00-{TRACE[:-1]}.-{SPAN}-01", f"00-{TRACE}-{SPAN}-1", f"00-{TRACE}-{SPAN}-001",
        f"00-{TRACE}-{SPAN}-.0", f"00_{TRACE}_{SPAN}_01", f"00 {TRACE} {SPAN} 01", f"00--{TRACE}-{SPAN}-01",
        f"00-{'٣' * 32}-{SPAN}-01", f"00-+{TRACE[1:]}-{SPAN}-01", f"cc-{TRACE}-{SPAN}-01-a\nb", f"{GOOD}\0",
    ],
)  # fmt: skip
def test_malformed(header: str) -> None:
    assert parse(header) is None


@given(st.text() | st.text("0123456789abcdef-", min_size=50, max_size=60) | st.from_regex(r"[0-9a-f-]{55}(-.*)?"))
@example("00-" + "f" * 32 + "-" + "f" * 16 + "-ff")
def test_anything(header: str) -> None:
    parent = parse(header)
    if parent is not None:
        assert re.fullmatch("[0-9a-f]{32}", parent.trace_id)
        assert re.fullmatch("[0-9a-f]{16}", parent.span_id)
        assert int(parent.trace_id, 16)
        assert int(parent.span_id, 16)
        assert f"{parent.trace_id}-{parent.span_id}" in header


ids = st.tuples(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.integers(0, 255), st.integers(0, 254))


@given(ids)
def test_every_well_formed_one(parts: tuple[int, int, int, int]) -> None:
    trace, span, flags, version = parts
    header = f"{version:02x}-{trace:032x}-{span:016x}-{flags:02x}"
    assert parse(header) == Parent(f"{trace:032x}", f"{span:016x}", bool(flags & 1))
    assert parse(header.upper()) in (None, parse(header))
