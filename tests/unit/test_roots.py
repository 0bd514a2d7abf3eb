"""Roots and their parents in the engine's front end: one per call, whichever of its doors the call came through."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextvars import Context
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from opentelemetry import trace

from stagetrace import marks, parents, runtime
from stagetrace.context import Root, current
from stagetrace.marks import Mark, TextMark
from stagetrace.recorder import Recorder
from stagetrace_otlp.policy import Policy
from stagetrace_vllm import api_hooks, asgi, roots
from tests.unit.helpers import rings
from tests.unit.scripted import Ask, Script


def headers(digit: str) -> dict[str, str]:
    return {"traceparent": f"00-{digit * 32}-{digit * 16}-01", "tracestate": f"v={digit}"}


@pytest.fixture
def recorder(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    made = Recorder(directory)
    monkeypatch.setattr(roots, "recorder", made)
    monkeypatch.setattr(asgi, "recorder", made)
    yield made
    assert current.get() is None, "a root is left in the context"


def written(directory: Path) -> list[Mark | TextMark]:
    return [mark for ring in rings(directory) for mark in ring.read(final=True)]


def parent_of(directory: Path, root: Root) -> list[str]:
    """The traceparents written for a root, in order."""
    found = [m for m in written(directory) if isinstance(m, TextMark) and m.key == root.number]
    return [m.text for m in found if m.field == marks.TRACEPARENT]


def span(number: int) -> trace.Span:
    return trace.NonRecordingSpan(trace.SpanContext(number, number, False, trace.TraceFlags(1)))


def test_headers_go_before_the_current_span(recorder: Recorder, directory: Path) -> None:
    with trace.use_span(span(5)):
        given, found = roots.begin(marks.HTTP, headers=headers("a")), roots.begin(marks.OFFLINE)
        unsound = roots.begin(marks.DIRECT, headers={"traceparent": "nobody"})
    assert parent_of(directory, given) == [headers("a")["traceparent"]]
    assert parent_of(directory, found) == parent_of(directory, unsound) == [f"00-{5:032x}-{5:016x}-01"]
    assert parent_of(directory, roots.begin(marks.HTTP)) == []


def test_trace_headers_go_before_the_current_span_but_not_before_the_request_s_own(
    recorder: Recorder, directory: Path
) -> None:
    with trace.use_span(span(5)):
        inherited = roots.begin(marks.HTTP)
    brought = roots.begin(marks.HTTP, headers=headers("a"))
    for root in (inherited, brought):
        token = current.set(root)
        assert roots.direct_entered(None, "id", "prompt", headers("b")) is None
        current.reset(token)
    assert parent_of(directory, inherited)[-1] == headers("b")["traceparent"]
    assert parent_of(directory, brought) == [headers("a")["traceparent"]]


@pytest.mark.parametrize(
    "given", [[b"nobody"], [headers("a")["traceparent"].encode(), headers("c")["traceparent"].encode()]]
)
def test_a_parent_that_the_headers_do_not_name_is_not_found_in_what_the_engine_read_of_them(
    given: list[bytes], recorder: Recorder, directory: Path
) -> None:
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "headers": [(b"traceparent", g) for g in given],
    }

    async def nothing(*_: object) -> None:
        raise AssertionError("nobody sends or receives")

    watch = asgi.begin(scope, nothing, nothing)
    assert watch is not None
    token = current.set(watch.root)
    roots.direct_entered(None, "id", "prompt", headers("a"))
    current.reset(token)
    assert parent_of(directory, watch.root) == []


def test_concurrent_requests_keep_their_roots(recorder: Recorder, directory: Path) -> None:
    async def ask(digit: str) -> tuple[str, Root, Root | None]:
        state = roots.direct_entered(None, digit, "prompt", headers(digit))
        assert state is not None
        await asyncio.sleep(0)
        inside = current.get()
        assert await asyncio.to_thread(tokenizes, digit) is inside
        roots.direct_left(state, None, None)
        roots.direct_done(state)
        return digit, state.root, inside

    def tokenizes(digit: str) -> Root | None:
        """What a thread that has inherited nothing works for."""

        def work() -> Root | None:
            token = roots.prompt_entered(None, digit)
            inside = current.get()
            roots.prompt_done(token)
            assert current.get() is None
            return inside

        return Context().run(work)

    async def all_of_them() -> list[tuple[str, Root, Root | None]]:
        return await asyncio.gather(*map(ask, "123456789"))

    for digit, root, inside in asyncio.run(all_of_them()):
        assert inside is root and root.kind == marks.DIRECT
        assert parent_of(directory, root) == [headers(digit)["traceparent"]]


def test_a_call_that_is_refused_or_given_up_at_the_door_ends(recorder: Recorder, directory: Path) -> None:
    for error in (ValueError(), asyncio.CancelledError()):
        state = roots.direct_entered(None, "id", "prompt", None)
        assert state is not None
        roots.direct_failed(state, None, error)
        roots.direct_done(state)
    kinds = [m.kind for m in written(directory) if isinstance(m, Mark)]
    assert kinds == [marks.ROOT, marks.END, marks.ROOT, marks.DISCONNECT, marks.END]


class Refused(Exception):
    """An exception of the application's."""


def test_of_an_exception_the_class_is_kept_and_never_the_message(recorder: Recorder, directory: Path) -> None:
    async def app(*_: object) -> None:
        raise Refused("secret prompt")

    async def nothing(*_: object) -> None:
        raise AssertionError("nobody sends or receives")

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    with pytest.raises(Refused):
        asyncio.run(asgi.Shell(app)(scope, nothing, nothing))
    state = roots.direct_entered(None, "id", "prompt", None)
    roots.direct_failed(state, None, ValueError("secret prompt"))
    roots.direct_done(state)
    outermost = roots.offline_entered(None)
    roots.root_now()
    roots.offline_failed(outermost, None, KeyError("secret prompt"))
    roots.offline_done(outermost)
    found = [m.text for m in written(directory) if isinstance(m, TextMark) and m.field == marks.ERROR]
    assert found == [f"{__name__}.Refused", "ValueError", "KeyError"]
    assert [m.a for m in written(directory) if isinstance(m, Mark) and m.kind == marks.END] == [1, 1, 1]
    assert not [m for m in written(directory) if isinstance(m, TextMark) and "secret" in m.text]


def test_a_call_whose_hand_over_fails_ends_at_the_door(recorder: Recorder, directory: Path) -> None:
    """Else it would wait for marks that nobody writes."""
    state = roots.direct_entered(None, "id", "prompt", None)
    roots.direct_left(state, None, None)
    roots.direct_done(state)
    with_hand_over = roots.direct_entered(None, "id", "prompt", None)
    assert with_hand_over is not None and with_hand_over.root is not None
    with_hand_over.root.sequences.append(1)
    roots.direct_left(with_hand_over, None, None)
    roots.direct_done(with_hand_over)
    found = [(m.kind, m.a, m.b) for m in written(directory) if isinstance(m, Mark) and m.kind != marks.ROOT]
    assert found == [(marks.END, 0, 1)]


@pytest.mark.parametrize("seen", [True, False])
def test_an_offline_call_whose_end_goes_unseen_does_not_swallow_the_next_one(
    seen: bool, recorder: Recorder, directory: Path
) -> None:
    outermost = roots.offline_entered(None)
    assert not roots.offline_entered(None), "a call within the call"
    first = roots.root_now()
    if seen:
        roots.offline_left(outermost, None, None)
    roots.offline_done(False)
    roots.offline_done(outermost)
    assert roots.offline_entered(None)
    second = roots.root_now()
    roots.offline_left(True, None, None)
    roots.offline_done(True)
    ends = [(m.key, m.b) for m in written(directory) if isinstance(m, Mark) and m.kind == marks.END]
    assert first is not None and second is not None and first is not second
    assert ends == [(first.number, 0 if seen else marks.END_UNSEEN), (second.number, 0)]


@pytest.mark.parametrize("state", ["installed", "failing ValueError", "removed ValueError"])
def test_what_has_gone_unseen_is_said(
    state: str, recorder: Recorder, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "_state", runtime._State(fates={roots.APPLICATION: state, roots.HAND_OVER: state}))
    made = roots.begin(*roots.stranger())
    roots.end(made)
    token = current.set(made)
    roots.direct_entered(None, "id", "prompt", None)
    roots.end(made)
    roots.direct_failed(None, None, ValueError())
    roots.end(made)
    current.reset(token)
    made.entered = True
    made.sequences.append(1)
    roots.end(made)
    root, elsewhere, unseen, refused, seen = [m for m in written(directory) if isinstance(m, Mark)]
    well = state == "installed"
    assert (root.c, root.d) == ((3, marks.DIRECT) if well else (0, marks.UNWATCHED))
    assert (elsewhere.b, unseen.b, refused.b, seen.b) == (0, 0 if well else 1, 0, 0)


def test_a_request_in_pieces_is_one_call_from_its_first_piece_on(
    recorder: Recorder, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_hooks, "recorder", recorder)

    async def pieces() -> AsyncGenerator[str]:
        yield "piece"

    async def hand_over(name: str) -> Root | None:
        """The engine's task for it: two pieces, and the word that there are no more."""
        assert current.get() is None
        for prompt in ((1, 2), (3, 4, 5), (0,)):
            await asyncio.sleep(0)
            api_hooks.handed_over(None, Request(name, prompt), None, 0)
        return current.get()

    async def session(digit: str) -> Root | None:
        state = roots.direct_entered(None, digit, pieces(), headers(digit))
        task = asyncio.create_task(hand_over(f"r-{digit}"))
        roots.direct_left(state, None, None)
        roots.direct_done(state)
        assert not roots.in_pieces()
        return await task

    async def both() -> list[Root | None]:
        return await asyncio.gather(session("a"), session("b"))

    found = asyncio.run(both())
    assert current.get() is None
    for root, digit in zip(found, "ab", strict=True):
        assert root is not None and root.sequences == [marks.key_of(f"r-{digit}")]
        assert parent_of(directory, root) == [headers(digit)["traceparent"]]
    kinds = [m.kind for m in written(directory) if isinstance(m, Mark)]
    assert (kinds.count(marks.ROOT), kinds.count(marks.ADD)) == (2, 2)
    state = roots.direct_entered(None, "id", pieces(), None)
    roots.direct_failed(state, None, ValueError())
    roots.direct_done(state)
    assert not roots.in_pieces()
    assert [m.kind for m in written(directory) if isinstance(m, Mark)] == kinds, "refused before there was a request"


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ([(b"Authorization", b"secret"), (b"Cookie", b"secret")], {}),
        ([(b"X-Request-Id", b"mine"), (b"TraceParent", b"one")], {"x-request-id": "mine", "traceparent": "one"}),
        # The engine answers under the first id, so no other one is the request's.
        ([(b"x-request-id", b"first"), (b"X-Request-Id", b"second")], {"x-request-id": "first"}),
        ([(b"x-request-id", b"x" * 129), (b"X-Request-Id", b"second")], {}),
        ([(b"x-request-id", b"\xff"), (b"X-Request-Id", b"second")], {}),
        ([(b"x-request-id", b" ")], {}),
        ([(b"x-request-id", b"a\tb")], {}),
        # Trace Context: a request with two parents has none; states in several headers are one list.
        ([(b"traceparent", b"one"), (b"traceparent", b"two")], {"traceparent": ""}),
        ([(b"traceparent", b"x" * 129)], {"traceparent": ""}),
        ([(b"tracestate", b"a=1"), (b"tracestate", b"b=2")], {"tracestate": "a=1,b=2"}),
        ([(b"tracestate", b"a=" + b"x" * 254), (b"tracestate", b"b=" + b"x" * 254)], {}),
        ([(b"tracestate", b"x" * 513)], {}),
    ],
)
def test_a_request_s_headers(given: list[tuple[bytes, bytes]], found: dict[str, str]) -> None:
    assert asgi.texts(given) == found


@pytest.mark.parametrize("identifier", ["chatcmpl-" + "x" * 152, "chatcmpl-\x1b[31m", "a\nb"])
def test_an_id_that_is_no_name_is_not_kept(
    identifier: str, recorder: Recorder, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_hooks, "recorder", recorder)
    for name in (identifier, "chatcmpl-" + "é" * 100):
        api_hooks.handed_over(SimpleNamespace(), Request(name), None, 0)
    found = {m.field: m.text for m in written(directory) if isinstance(m, TextMark)}
    assert found == dict.fromkeys((marks.INTERNAL_ID, marks.EXTERNAL_ID), "chatcmpl-" + "é" * 100)
    assert len([m for m in written(directory) if isinstance(m, TextMark)]) == 2


@dataclass
class Request:
    request_id: str = "r-1"
    prompt_token_ids: tuple[int, ...] = (1, 2)
    sampling_params: None = None
    trace_headers: dict[str, str] | None = None


@pytest.fixture
def hand_over(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Root, object]]:
    """A request that came with ``given`` goes through the hand-over; its root, and what it has afterwards."""

    def through(given: dict[str, str] | None, share: float | None, tracing: bool = True) -> tuple[Root, object]:
        monkeypatch.setattr(api_hooks, "recorder", recorder)
        monkeypatch.setattr(api_hooks, "exported_share", lambda: share)
        root = roots.begin(marks.HTTP, headers=given)
        token = current.set(root)
        request = Request(trace_headers=given)
        api_hooks.handed_over(SimpleNamespace(tracing_enabled=tracing), request, None, 0)
        current.reset(token)
        return root, request.trace_headers

    return through


@pytest.mark.parametrize("caller", ["a", None])
@pytest.mark.parametrize(("tracing", "share"), [(True, 1.0), (True, None), (False, 1.0)])
def test_a_span_of_the_engine_s_own_becomes_our_child_where_both_are_exported(
    hand_over: Callable[..., tuple[Root, dict[str, str]]], tracing: bool, share: float | None, caller: str | None
) -> None:
    given = headers(caller) if caller else None
    root, left = hand_over(given, share, tracing)
    if not (tracing and share):
        assert left == given
        return
    found = parents.of_headers(left)
    assert found is not None and found.span.span_id == f"{root.number:016x}" and found.span.sampled
    assert found.span.trace_id == (caller * 32 if caller else f"{root.trace_high:016x}{root.trace_low:016x}")
    assert found.tracestate == (f"v={caller}" if caller else "")


def test_a_root_that_is_not_exported_gets_no_children(
    hand_over: Callable[..., tuple[Root, dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those would be orphans: the request keeps what it came with. A caller's wish goes before any ratio."""
    unsampled = {"traceparent": f"00-{'a' * 32}-{'a' * 16}-00"}
    assert hand_over(unsampled, 1.0)[1] == unsampled
    assert hand_over(headers("a"), 0.0)[1] != headers("a")
    assert hand_over(None, 0.0)[1] is None
    policy, kept = Policy({}, 0.5), 0
    (record,) = Script().run(Ask()).records()
    for _ in range(200):
        root, left = hand_over(None, policy.ratio)
        trace = f"{root.trace_high:016x}{root.trace_low:016x}"
        assert (left is not None) == policy.exports([replace(record, trace_id=trace)])
        kept += left is not None
    assert 60 < kept < 140
    monkeypatch.setenv("STAGETRACE_TRUST_TRACEPARENT", "0")
    assert hand_over(headers("a"), 0.0)[1] == headers("a"), "its wish is not trusted either"


def test_a_caller_that_is_not_trusted_is_not_handed_on(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGETRACE_TRUST_TRACEPARENT", "0")
    root = roots.begin(marks.HTTP, headers=headers("a"))
    found = parents.of_headers(roots.headers_of(root, 1.0))
    assert found is not None and found.span.trace_id == f"{root.trace_high:016x}{root.trace_low:016x}"
    assert found.tracestate == ""
