"""A root's parent: from headers, else from the span the code is in, and never from anything unsound."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from opentelemetry import trace

from stagetrace import parents
from stagetrace.propagation import Parent
from tests.unit.helpers import python

SOUND = f"00-{'ab' * 16}-{'cd' * 8}-01"


def test_headers() -> None:
    found = parents.of_headers({"Traceparent": SOUND, "tracestate": "a=1", "authorization": "secret"})
    assert found == (Parent("ab" * 16, "cd" * 8, True), SOUND, "a=1", True)


@pytest.mark.parametrize(
    "headers",
    [
        None, {}, {"tracestate": "a=1"}, {"traceparent": ""}, {"traceparent": SOUND.replace("c", "x")},
        {"traceparent": f"00-{'0' * 32}-{'cd' * 8}-01"}, {"traceparent": SOUND + "-" + "0" * 100},
    ],
)  # fmt: skip
def test_headers_that_name_nobody(headers: dict[str, str] | None) -> None:
    assert parents.of_headers(headers) is None


@pytest.mark.parametrize("state", ["a" * 513, "a=\n", "ä=1"])
def test_a_bad_state_costs_no_parent(state: str) -> None:
    found = parents.of_headers({"traceparent": SOUND, "tracestate": state})
    assert found is not None and found.tracestate == ""


def test_the_current_span() -> None:
    assert parents.of_current_span() is None
    context = trace.SpanContext(7, 9, False, trace.TraceFlags(1), trace.TraceState([("vendor", "x")]))
    with trace.use_span(trace.NonRecordingSpan(context)):
        found = parents.of_current_span()
    assert found == (Parent(f"{7:032x}", f"{9:016x}", True), f"00-{7:032x}-{9:016x}-01", "vendor=x", False)


def test_a_provider_of_the_host_s_own_making_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    span = SimpleNamespace(get_span_context=lambda: 1 / 0)
    with trace.use_span(span):  # type: ignore[arg-type]
        assert parents.of_current_span() is None
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.trace", object())
    assert parents.of_current_span() is None


def test_opentelemetry_is_not_imported_for_it() -> None:
    code = (
        "import sys; from stagetrace import parents; print(parents.of_current_span(), 'opentelemetry' in sys.modules)"
    )
    assert python(code).stdout.split() == ["None", "False"]
