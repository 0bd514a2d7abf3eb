"""What the front end's hooks make of each API: its paths, its stream's first text, its ids, and its threads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stagetrace import marks
from stagetrace.context import Root, current, new_root
from stagetrace.marks import Mark
from stagetrace.recorder import Recorder
from stagetrace_vllm import api_hooks, asgi, engine_hooks, held, roots
from tests.unit.helpers import rings


@pytest.fixture
def recorder(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    made = Recorder(directory)
    for module in (roots, asgi, api_hooks):
        monkeypatch.setattr(module, "recorder", made)
    yield made
    assert current.get() is None and not held._roots


def written(directory: Path, *kinds: int) -> list[Mark]:
    found = [m for ring in rings(directory) for m in ring.read(final=True) if isinstance(m, Mark) and m.kind in kinds]
    return sorted(found, key=lambda mark: mark.t)


def begin(path: str, method: str = "POST") -> asgi.Watch | None:
    async def nothing(*_: Any) -> Any: ...

    return asgi.begin({"type": "http", "method": method, "path": path, "headers": []}, nothing, nothing)


@pytest.mark.parametrize(
    ("path", "operation"),
    [
        ("/v1/chat/completions", "chat"), ("/v1/completions", "text_completion"), ("/v1/responses", "chat"),
        ("/v1/messages", "chat"), ("/inference/v1/generate", "generate_content"), ("/v1/embeddings", "embeddings"),
        ("/pooling", "pooling"), ("/classify", "classify"), ("/v1/score", "score"), ("/v2/rerank", "rerank"),
    ],
)  # fmt: skip
def test_paths_that_end_in_the_engine(path: str, operation: str, recorder: Recorder, directory: Path) -> None:
    watch = begin(path)
    assert watch is not None
    (mark,) = written(directory, marks.ROOT)
    assert (mark.key, marks.OPERATIONS[mark.c], mark.d) == (watch.root.number, operation, marks.HTTP)


@pytest.mark.parametrize(
    ("path", "method"),
    [
        ("/v1/chat/completions/render", "POST"), ("/tokenize", "POST"), ("/v1/responses/resp_1/cancel", "POST"),
        ("/v1/responses", "GET"), ("/v1/audio/transcriptions", "POST"), ("/health", "GET"),
    ],
)  # fmt: skip
def test_paths_that_do_not(path: str, method: str, recorder: Recorder) -> None:
    assert begin(path, method) is None


def event(value: dict[str, Any], name: str = "") -> bytes:
    return (f"event: {name}\n" if name else "").encode() + b"data: " + json.dumps(value).encode() + b"\n\n"


@pytest.mark.parametrize(
    ("chunk", "text"),
    [
        (event({"choices": [{"delta": {"role": "assistant", "content": ""}}]}), False),
        (event({"choices": [{"delta": {"content": "a"}}]}), True),
        (event({"choices": [{"delta": {"reasoning": "a"}}]}), True),
        (event({"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]}), True),
        (event({"choices": [], "usage": {"prompt_tokens": 3}}), False),
        (event({"choices": [{"text": ""}]}) + event({"choices": [{"text": "a"}]}), True),
        (event({"choices": [{"token_ids": [7]}]}), True),
        (b"data: [DONE]\n\n", False),
        (event({"type": "response.created", "response": {"id": "r"}}, "response.created"), False),
        (event({"type": "response.output_item.added", "item": {"content": []}}), False),
        (event({"type": "response.output_text.delta", "delta": "a"}, "response.output_text.delta"), True),
        (event({"type": "response.output_text.delta", "delta": ""}), False),
        (event({"type": "message_start", "message": {"content": []}}, "message_start"), False),
        (event({"type": "content_block_delta", "delta": {"type": "text_delta", "text": "a"}}), True),
        (event({"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": "{"}}), True),
        (event({"type": "message_delta", "delta": {"stop_reason": "end_turn"}}), False),
    ],
)
def test_the_first_text_of_a_stream(chunk: bytes, text: bool) -> None:
    assert asgi.has_text(chunk) is text


def http(path: str) -> Root:
    root = new_root(marks.HTTP)
    root.numbered = asgi.ROUTES[path].numbered
    return root


@pytest.mark.parametrize(
    ("path", "engine", "answered"),
    [
        ("/v1/chat/completions", "chatcmpl-my-own-7", "chatcmpl-my-own-7"),
        ("/v1/completions", "cmpl-my-own-7-0", "cmpl-my-own-7"),
        ("/v1/responses", "resp_0123_2", "resp_0123"),
        ("/v1/messages", "chatcmpl-0123", "chatcmpl-0123"),
        ("/v1/embeddings", "embd-x-12", "embd-x"),
        ("/rerank", "score-x-1", "score-x"),
        ("/rerank", "late-interaction-0f-query-x", "late-interaction-0f-query-x"),
        ("/v1/completions", "cmpl-x-ad4bb2da446ffa01-beam-3", "cmpl-x"),
        ("/v1/chat/completions", "chatcmpl-x-ad4bb2da446ffa01-beam-0", "chatcmpl-x"),
    ],
)
def test_the_id_the_client_is_answered_with(path: str, engine: str, answered: str) -> None:
    request = SimpleNamespace(external_req_id=engine, request_id=f"{engine}-0a1b2c3d")
    assert api_hooks.response_id(request, http(path)) == answered
    assert api_hooks.response_id(request, new_root(marks.DIRECT)) == engine


def test_positions_of_a_prompt_are_counted_or_unknown() -> None:
    def count(**given: Any) -> int:
        return api_hooks.prompt_tokens(SimpleNamespace(**{"prompt_token_ids": None, **given}))

    assert count(prompt_token_ids=[1, 2, 3]) == 3
    assert count(prompt_embeds=[[0.1]] * 5) == 5
    assert count(prompt_token_ids=[1, 2], prompt_embeds=[[0.1]] * 2) == 2
    assert count() == -1


def test_a_handler_that_calls_another_has_been_entered_once(recorder: Recorder, directory: Path) -> None:
    root = http("/v1/messages")
    token = current.set(root)
    api_hooks.handler_entered(None, SimpleNamespace(stream=True, max_tokens=9))
    api_hooks.handler_entered(None, SimpleNamespace(stream=False, max_tokens=4))
    current.reset(token)
    (mark,) = written(directory, marks.HANDLER)
    assert (mark.b, mark.c, mark.d) == (1, 1, 9)


class Embedding:
    """A body with the fields of an embedding request."""

    def __init__(self, texts: list[str]) -> None:
        self.model, self.input, self.dimensions = "m", texts, 3


def render(text: str) -> None:
    """What the renderer does in a thread of its pool."""
    prompts = [{"prompt": text}]
    state = api_hooks.tokenize_entered(None, prompts)
    api_hooks.tokenizer_took(None, prompts[0])
    api_hooks.tokenize_left(state, None, [{"prompt_token_ids": [1, 2, 3]}])
    api_hooks.let_go(state)


def entered(body: Embedding) -> tuple[Root, Any]:
    root = http("/v1/embeddings")
    token = current.set(root)
    state = api_hooks.pooling_entered(None, body)
    current.reset(token)
    return root, state


def rendered(*bodies: Embedding) -> None:
    """Each text by a thread that inherits no context, as those of the engine's executors do not."""
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(render, [text for body in bodies for text in body.input]))


def test_threads_of_the_pool_know_whose_text_they_have(recorder: Recorder, directory: Path) -> None:
    body = Embedding(["some text", "another"])
    root, state = entered(body)
    rendered(body)
    api_hooks.let_go(state)
    assert [m.key for m in written(directory, marks.HANDLER)] == [root.number]
    for kind, values in ((marks.TOKENIZE, [7, 9]), (marks.TOKENIZE_RUN, [0, 0]), (marks.TOKENIZED, [3, 3])):
        found = written(directory, kind)
        assert {m.key for m in found} == {root.number}
        assert sorted(m.a for m in found) == values


def test_an_object_that_two_calls_hold_is_nobodys(recorder: Recorder, directory: Path) -> None:
    shared = "the very same"
    bodies = [Embedding([shared, f"own {i}"]) for i in range(2)]
    held_by = [entered(body) for body in bodies]
    rendered(*bodies)
    for _, state in held_by:
        api_hooks.let_go(state)
    found = written(directory, marks.TOKENIZE)
    assert sorted((m.key, m.a) for m in found) == sorted((root.number, 5) for root, _ in held_by)


def test_messages_rendered_in_a_thread(recorder: Recorder, directory: Path) -> None:
    root, messages = http("/v1/embeddings"), [{"role": "user", "content": "text"}]
    kept = held.hold(root, held.parts(SimpleNamespace(messages=messages)))
    token = api_hooks.render_entered(None, [messages])
    assert current.get() is root
    render("a rendered string")
    roots.prompt_done(token)
    held.release(root, kept)
    assert [(m.kind, m.key) for m in written(directory, marks.RENDER, marks.TOKENIZE)] == [
        (marks.RENDER, root.number), (marks.TOKENIZE, root.number)
    ]  # fmt: skip
    assert api_hooks.render_entered(None, [messages]) is None


def test_a_grammar_is_asked_of_its_future_alone() -> None:
    class Grammar:
        @property
        def is_grammar_ready(self) -> bool:
            raise AssertionError("takes the result out of the future")

    def pending(done: bool | None) -> bool:
        structured = Grammar()
        if done is not None:
            structured._grammar = SimpleNamespace(done=lambda: done)  # type: ignore[attr-defined]
        return engine_hooks.compiling(SimpleNamespace(structured_output_request=structured))

    assert [pending(False), pending(True), pending(None)] == [True, False, False]
    assert not engine_hooks.compiling(SimpleNamespace(structured_output_request=None))
