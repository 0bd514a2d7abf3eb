"""Roots in the engine's front end as live spans of the host's provider."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import Span
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased

from stagetrace import marks, parents, provider
from stagetrace.context import Root, current
from stagetrace.marks import Mark, TextMark, unsigned
from stagetrace.recorder import Recorder
from stagetrace.rings import set_paused
from stagetrace_vllm import asgi, roots
from tests.unit.helpers import rings
from tests.unit.hosts import Host, Noting

CALLER = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "tracestate": "v=1"}


@pytest.fixture
def recorder(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    made = Recorder(directory)
    monkeypatch.setattr(roots, "recorder", made)
    monkeypatch.setattr(asgi, "recorder", made)
    yield made
    provider.release()
    assert current.get() is None and trace.get_current_span() is trace.INVALID_SPAN


def written(directory: Path, kind: int) -> list[Mark]:
    found = [mark for ring in rings(directory) for mark in ring.read(final=True)]
    return [mark for mark in found if isinstance(mark, Mark) and mark.kind == kind]


def texts(directory: Path, field: int) -> list[str]:
    found = [mark for ring in rings(directory) for mark in ring.read(final=True)]
    return [mark.text for mark in found if isinstance(mark, TextMark) and mark.field == field]


def span_of(root: Root) -> Span:
    assert root.live is not None
    span = root.live.span  # type: ignore[attr-defined]
    assert isinstance(span, Span)
    return span


def test_a_root_has_the_ids_and_the_start_of_its_span(recorder: Recorder, directory: Path) -> None:
    host = Host()
    mono, wall = provider.use(host.live)
    root = roots.begin(marks.HTTP, 1)
    (mark,) = written(directory, marks.ROOT)
    span = span_of(root)
    assert mark.key == root.number == span.context.span_id
    assert unsigned(mark.a) << 64 | unsigned(mark.b) == span.context.trace_id
    assert span.start_time == wall + mark.t - mono
    assert span.name == "chat"


def test_an_offline_call_s_spans_begin_with_it(recorder: Recorder, directory: Path) -> None:
    host = Host()
    mono, wall = provider.use(host.live)
    assert roots.offline_entered(None)
    found = [roots.root_now(), roots.handed_over(), roots.root_now()]
    roots.offline_left(True, None, None)
    roots.offline_done(True)
    starts = {span_of(root).start_time for root in found if root}
    assert starts == {wall + mark.t - mono for mark in written(directory, marks.ROOT)} and len(starts) == 1
    assert {root.number for root in found if root} == {0x1000, 0x1001}


def test_the_host_s_spans_nest_below_a_request_that_comes_over_http(recorder: Recorder) -> None:
    host = Host()
    provider.use(host.live)
    seen: list[int] = []

    async def app(scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        async def work() -> None:
            with host.provider.get_tracer("host").start_as_current_span("theirs"):
                seen.append(trace.get_current_span().get_span_context().span_id)

        await asyncio.create_task(work())  # as a web framework does
        if scope["path"].endswith("completions"):
            root = current.get()
            assert root is not None
            seen.append(root.number)

    async def nothing(*_: object) -> asgi.Message:
        return {"type": "http.request"}

    def scope(path: str, *headers: tuple[bytes, bytes]) -> asgi.Scope:
        return {"type": "http", "method": "POST", "path": path, "headers": headers}

    brought = tuple((name.encode(), value.encode()) for name, value in CALLER.items())
    shell = asgi.Shell(app)
    for asked in (scope("/v1/chat/completions", *brought), scope("/health")):
        asyncio.run(shell(asked, nothing, nothing))  # type: ignore[arg-type]
    theirs, outside = host.spans
    assert theirs.parent is not None and theirs.parent.span_id == seen[1]
    assert theirs.context.trace_id == int("a" * 32, 16)
    assert outside.parent is None, "a route that is not ours"


def test_a_request_that_comes_while_recording_is_paused_has_no_span(recorder: Recorder, directory: Path) -> None:
    noting = Noting()
    provider.use(Host(noting).live)
    assert not recorder.paused()
    set_paused(directory, True)
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": ()}
    assert asgi.begin(scope, None, None) is None  # type: ignore[arg-type]
    set_paused(directory, False)
    assert asgi.begin(scope, None, None) is not None  # type: ignore[arg-type]
    assert noting.started == ["text_completion"]


def test_a_parent_that_comes_too_late_is_none(recorder: Recorder, directory: Path) -> None:
    host = Host()
    provider.use(host.live)
    root = roots.begin(marks.HTTP, 1)
    roots.adopt(root, parents.of_headers(CALLER))
    assert root.caller is None and texts(directory, marks.TRACEPARENT) == []
    provider.release()
    root = roots.begin(marks.HTTP, 1)
    roots.adopt(root, parents.of_headers(CALLER))
    assert root.live is None and texts(directory, marks.TRACEPARENT) == [CALLER["traceparent"]]


def test_a_caller_that_is_not_trusted(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGETRACE_TRUST_TRACEPARENT", "0")
    host = Host()
    provider.use(host.live)
    root = roots.begin(marks.HTTP, 1, headers=CALLER)
    assert span_of(root).parent is None
    assert roots.headers_of(root, None) == {"traceparent": f"00-{0xABC:032x}-{root.number:016x}-01"}


def test_the_engine_s_own_span_is_a_child_of_what_the_sampler_keeps(recorder: Recorder) -> None:
    host = Host(sampler=ParentBased(ALWAYS_OFF))
    provider.use(host.live)
    kept, dropped = roots.begin(marks.HTTP, 1, headers=CALLER), roots.begin(marks.HTTP, 1)
    provider.release()
    no_span = roots.begin(marks.HTTP, 1, headers=CALLER)
    found = roots.headers_of(kept, None)
    assert found is not None and found["traceparent"] == f"00-{'a' * 32}-{kept.number:016x}-01"
    assert roots.headers_of(dropped, None) is None and roots.headers_of(no_span, None) is None


def test_at_the_engine_s_door_the_span_is_current_and_then_not(recorder: Recorder) -> None:
    host = Host()
    provider.use(host.live)
    state = roots.direct_entered(None, "id", "prompt", CALLER)
    assert state is not None and state.root is not None
    assert trace.get_current_span() is span_of(state.root)
    roots.direct_left(state, None, None)
    roots.direct_done(state)


def test_a_failing_provider_is_counted_and_asked_no_more(
    recorder: Recorder, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[str] = []
    noting = Noting("chat")
    host = Host(noting)
    provider.use(host.live, lambda target, state: told.append(f"{target} {state}"))
    made = [roots.begin(marks.HTTP, 1) for _ in range(8)]
    assert {root.live for root in made} == {None} and len({root.number for root in made}) == 8
    assert told == ["tracer_provider failing ZeroDivisionError", "tracer_provider removed ZeroDivisionError"]
    assert len(noting.started) == 5 and len(caplog.records) == 1
    assert len(written(directory, marks.ROOT)) == 8


def test_a_span_that_cannot_be_made_current(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host()
    provider.use(host.live)
    root = roots.begin(marks.HTTP, 1)
    assert root.live is not None
    monkeypatch.setattr(root.live, "attach", None)
    entered = provider.enter(root)
    assert current.get() is root
    provider.leave(entered)
