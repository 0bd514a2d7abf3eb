"""The stopwatch on terminals of different widths, and where there is no terminal."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from stagetrace.model import RequestRecord
from stagetrace.report.stopwatch import REFERENCE_MS, facts, reference_shares, stopwatch
from stagetrace.stages import STAGES
from tests.unit.scripted import MS, Ask, Script


def drawn(
    record: RequestRecord, width: int, terminal: bool = False, reference: dict[str, float] | None = None
) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=terminal, color_system="standard" if terminal else None)
    console.print(stopwatch(record, "chat one", reference))
    return out.getvalue().splitlines()


@pytest.fixture(scope="module")
def record() -> RequestRecord:
    return Script().run(Ask(output=30)).records()[0]


ROW = re.compile(r" ?(\d+)  (\w+) +")


def rows(lines: list[str]) -> dict[str, str]:
    return {match[2]: line for line in lines if (match := ROW.match(line))}


@pytest.mark.parametrize("reference", [None, "cold"])
@pytest.mark.parametrize("width", [80, 100, 139, 140, 160, 240])
def test_every_stage_has_one_aligned_line(record: RequestRecord, width: int, reference: str | None) -> None:
    lines = drawn(record, width, reference=reference_shares(reference) if reference else None)
    assert max(map(len, lines)) <= width
    assert lines[0] == "chat one"
    assert "start (ms)" in lines[1] and "time (ms)" in lines[1] and "share (%)" in lines[1]
    assert ("ref (%)" in lines[1]) == (reference is not None)
    found = rows(lines)
    assert list(found) == [stage.key for stage in STAGES]
    for name, value in (("start (ms)", 5.47), ("time (ms)", record.stage("decode").duration_ms)):
        right = lines[1].index(name) + len(name)
        assert float(found["decode"][:right].split()[-1]) == pytest.approx(value, abs=0.005)
    assert "█" in found["decode"]


def test_facts_are_below_on_a_narrow_terminal(record: RequestRecord) -> None:
    lines = drawn(record, 80)
    at = lines.index(rows(lines)["http_receive"])
    assert lines[at + 1] == "    bytes=200 route=/v1/chat stream=True n=1 max_tokens=30"
    at = lines.index(rows(lines)["decode"])
    assert lines[at + 1].startswith("    tokens=29 steps=29 batch=1.00")
    itl = lines.index("    itl_ms: p50=2.97 p95=2.97 p99=2.97 max=2.97")
    assert itl == at + 3, "facts take two lines, broken between words"
    # The largest part first.
    assert lines[itl + 1].startswith("    split_ms: forward=59.16 lm_head=5.80 ")
    assert "…" not in "".join(lines[at : itl + 1])


def test_facts_are_beside_on_a_wide_terminal(record: RequestRecord) -> None:
    lines = drawn(record, 160)
    found = rows(lines)
    assert found["http_receive"].endswith("bytes=200 route=/v1/chat stream=True n=1 max_tokens=30")
    column = found["http_receive"].index("bytes=")
    assert found["decode"].index("tokens=") == column
    assert "…" not in "".join(lines) and "schedule=" in "".join(lines)


def test_only_what_does_not_fit_is_cut(record: RequestRecord) -> None:
    record.stage("http_receive").attributes["route"] = "/" + "x" * 100
    try:
        lines = drawn(record, 80)
        cut = [line for line in lines if line.endswith("…")]
        assert len(cut) == 1 and len(cut[0]) == 80 and "route=/xxx" in cut[0]
    finally:
        record.stage("http_receive").attributes["route"] = "/v1/chat"


@pytest.mark.parametrize("width", [1, 20, 40])
def test_a_very_narrow_terminal_is_no_reason_to_fail(record: RequestRecord, width: int) -> None:
    assert drawn(record, width)


def test_plain_where_there_is_no_terminal(record: RequestRecord) -> None:
    assert "\x1b" not in "".join(drawn(record, 80))
    coloured = drawn(record, 80, terminal=True)
    assert any("\x1b[2m" in line and "bytes=200" in line for line in coloured), "facts are dim"


def test_without_the_characters_for_bars(record: RequestRecord) -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    Console(file=out, width=80).print(stopwatch(record, "chat one"))
    out.flush()
    assert "####" in raw.getvalue().decode("ascii")


def test_the_summary(record: RequestRecord) -> None:
    text = " ".join(" ".join(drawn(record, 80)).split())
    assert "TTFT 5.47 ms (streamed), queue 0.22 ms, prefill 2.80 ms" in text
    assert "ITL p50 2.97 ms, p95 2.97 ms, p99 2.97 ms, max 2.97 ms" in text
    assert "ok (length): 20 prompt tokens (0 cached) → 30 output tokens" in text
    assert "coverage 99." in text and "unattributed 0.49 ms (dispatch 0.24 ms" in text


def test_who_did_not_come_through() -> None:
    aborted = Script().run(Ask(output=60, abort_at=30 * MS)).records()[0]
    found = rows(drawn(aborted, 80))
    assert "not_reached" in found["teardown"]
    assert facts(aborted.stage("decode"))[0].startswith("interrupted")
    refused = Script().run(Ask(refuse="body")).records()[0]
    text = " ".join(" ".join(drawn(refused, 80)).split())
    assert "error in http_receive (HTTP 400): — prompt tokens (unknown cached) → — output tokens" in text
    assert "None" not in text
    why = replace(refused, http_status=500, error_type="RuntimeError")
    assert "error in http_receive (HTTP 500, RuntimeError): " in " ".join(" ".join(drawn(why, 80)).split())


def test_reference_shares_are_the_documents() -> None:
    assert sum(REFERENCE_MS.values()) == pytest.approx(1883.6)
    cold, short = reference_shares("cold"), reference_shares("short")
    assert cold["decode"] == pytest.approx(0.952, abs=1e-3) and cold["prefill"] == pytest.approx(0.046, abs=1e-3)
    assert short["prefill"] == pytest.approx(0.43, abs=0.01)
    for kind in ("cold", "warm", "loaded", "short"):
        assert sum(reference_shares(kind).values()) == pytest.approx(1)
