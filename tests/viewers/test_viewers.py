"""Requests of a real server in real trace viewers, read back through the viewers' own interfaces.

Not part of `make test`: `make viewers` installs MLflow and Phoenix the first time, 1.3 GB in `~/.cache/stagetrace`.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from stagetrace.collect import sinks
from stagetrace.exporting import Options
from stagetrace.model import RunRecord
from stagetrace.stages import STAGES
from stagetrace_vllm.demo_server import DemoServer
from tests.debian import program
from tests.invariants import check_all
from tests.unit.scripted import Ask, Script
from tests.viewers import viewers
from tests.viewers.conftest import CALLER, CROWD, Shown, arrived, shown
from tests.viewers.spans import Span, differences

PICTURES = Path(__file__).resolve().parents[2] / "build" / "viewers"
KEYS = [stage.key for stage in STAGES]
# The first of them may install a viewer, and each starts two servers.
pytestmark = pytest.mark.timeout(1500)


@pytest.fixture(scope="module", params=["mlflow", "phoenix"])
def view(
    request: pytest.FixtureRequest, engine: DemoServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Shown]:
    folder = tmp_path_factory.mktemp(request.param)
    with getattr(viewers, request.param)(folder) as viewer:
        yield shown(viewer, engine, folder)


def of(spans: list[Span], trace_id: str) -> list[Span]:
    return [span for span in spans if span.trace_id == trace_id]


def test_every_request_is_one_trace_with_one_root(view: Shown) -> None:
    check_all(list(view.records.values()))
    assert "were not exported" not in view.log
    roots = [span for span in view.ours if span.name not in KEYS]
    assert Counter(root.trace_id for root in roots) == Counter(r.trace_id for r in view.records.values())
    assert len(roots) == len(view.records) == CROWD + 4


def test_every_span_is_the_store_s(view: Shown) -> None:
    """Ids, names, times, attributes, events and links: all of what `export` makes of the same requests."""
    found = {span.span_id: span for span in view.ours}
    assert len(found) == len(view.ours) == len(view.exported)
    viewer = view.viewer
    apart = [
        line
        for span in view.exported
        for line in differences(found[span.span_id], span, viewer.within_ns, viewer.links)
    ]
    assert not apart, "\n".join(apart[:20])


def test_the_stages_are_there_in_order(view: Shown) -> None:
    near = view.viewer.within_ns
    for record in view.records.values():
        spans = of(view.ours, record.trace_id)
        measured = [stage for stage in record.stages if stage.duration_ms is not None]
        stages = sorted((s for s in spans if s.name in KEYS), key=lambda s: s.attributes["stagetrace.stage.number"])
        assert [span.name for span in stages] == [stage.key for stage in measured]
        for span, stage in zip(stages, measured, strict=True):
            assert stage.start_ms is not None
            assert abs(span.start_ns - record.start_unix_ns - stage.start_ms * 1e6) <= near + 1
            if stage.key != "prefill":  # whose span has gaps
                assert abs(span.end_ns - span.start_ns - stage.duration_ms * 1e6) <= 2 * near + 1
        (root,) = (span for span in spans if span.name not in KEYS)
        assert {span.parent_id for span in stages} == {root.span_id}
        assert abs(root.start_ns - record.start_unix_ns) <= near
        assert abs(root.end_ns - root.start_ns - record.e2e_ms * 1e6) <= 2 * near + 1


def test_the_caller_s_span_is_the_parent(view: Shown) -> None:
    record = view.records["caller"]
    (caller,) = (span for span in view.spans if span.name == CALLER)
    (root,) = (span for span in of(view.ours, caller.trace_id) if span.name not in KEYS)
    assert (root.trace_id, root.parent_id) == (record.trace_id, caller.span_id)
    assert caller.start_ns <= root.start_ns and root.end_ns <= caller.end_ns
    assert record.stage("admission").attributes["reason"] == "no_slot"
    others = [span for span in view.ours if span.name not in KEYS and span is not root]
    assert {span.parent_id for span in others} == {None}


def test_an_aborted_request_says_so(view: Shown) -> None:
    record = view.records["aborted"]
    (root,) = (s for s in of(view.ours, record.trace_id) if s.name not in KEYS)
    assert (record.status, root.attributes["stagetrace.status"]) == ("aborted", "aborted")
    assert root.attributes["error.type"] == "aborted"
    assert root.attributes["stagetrace.active_stage"] == "decode"
    assert [span for span in view.ours if span.status != "UNSET"] == [root]
    assert root.status == "ERROR"


@pytest.mark.parametrize("view", ["mlflow"], indirect=True)
def test_a_link_to_a_caller_who_is_not_trusted_arrives(view: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scripted request, sent as a collector would. (Phoenix keeps no links.)"""
    monkeypatch.setenv("STAGETRACE_TRUST_TRACEPARENT", "0")
    (record,) = Script().run(Ask(traceparent=f"00-{'c' * 32}-{'d' * 16}-01")).records()
    for name, value in view.viewer.variables.items():
        monkeypatch.setenv(name, value)
    (sink,) = sinks.build(Options(otlp=view.viewer.url), os.environ, lambda line: None)
    sink.run(RunRecord("s", "paper", "1", "tiny"))
    sink.requests([record])
    sink.flush()
    found = arrived(view.viewer, lambda spans: bool(of(spans, record.trace_id)))
    sink.close()
    (root,) = (s for s in of(found, record.trace_id) if s.name not in KEYS)
    assert root.parent_id is None and root.links == [("c" * 32, "d" * 16, {"stagetrace.link": "caller"})]


@pytest.mark.parametrize("view", ["mlflow"], indirect=True)
def test_a_person_sees_the_twelve_stages(view: Shown) -> None:
    """The picture is in build/viewers; docs/images has the one that was looked at."""
    chromium = program("chromium", "chromium", "fonts-dejavu-core")
    PICTURES.mkdir(parents=True, exist_ok=True)
    picture = PICTURES / "mlflow-waterfall.png"
    assert isinstance(view.viewer, viewers.Mlflow)
    trace_id = view.records["caller"].trace_id
    texts = json.loads(view.viewer.ask("picture.py", chromium, view.viewer.url, trace_id, "admission", str(picture)))
    assert {*KEYS, CALLER, "chat stagetrace-demo", "no_slot"} <= set(texts), texts
    assert picture.read_bytes()[:4] == b"\x89PNG" and picture.stat().st_size < 300_000
