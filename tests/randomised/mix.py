"""What clients ask at random, and when they leave: hypothesis strategies for a request of any kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from tests.engine.conftest import NAME
from tests.engine.serving import ClientResult, send, send_half

COMPLETION, RESPONSES, MESSAGES = "/v1/completions", "/v1/responses", "/v1/messages"
TOKEN_IDS, EMBEDDINGS, POOLING, SCORE = "/inference/v1/generate", "/v1/embeddings", "/pooling", "/v1/score"
CHAT = {"model": NAME, "messages": [{"role": "user", "content": "hello"}]}
#: Bodies that are to be refused, whatever the server does for a living.
NONSENSE: tuple[Any, ...] = (b"{nonsense", b"", {"model": NAME, "messages": "hello"}, {**CHAT, "model": "other"})
REFUSED: tuple[Any, ...] = (
    *NONSENSE,
    {**CHAT, "max_tokens": 9000},
    {**CHAT, "temperature": -3.0},
    {**CHAT, "n": 3, "temperature": 0.0},
    {**CHAT, "logprobs": True, "top_logprobs": 999},
    {**CHAT, "logprobs": True, "top_logprobs": 999, "stream": True},
    {**CHAT, "structured_outputs": {"regex": "((("}},
    {"model": NAME, "prompt": "hello " * 20000},
    {"model": NAME, "prompt": [5] * 9000, "stream": True},
)
#: When a client leaves, in seconds from its sending: before it is heard, in the queue, in prefill, in decode.
LEAVES_AFTER_S = (0.0005, 0.003, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5)
GENERATED = (
    *["chat"] * 8, *["completion"] * 4, *["prompts"] * 2, "responses", "messages", "token_ids", "refused", "refused",
    "half",
)  # fmt: skip
POOLED = ("embed", "embed", "embed_several", "embed_ids", "pooling", "score", "refused", "half")


@dataclass(frozen=True)
class Sizes:
    """Lengths in tokens; ``long`` are the answers of those who are to leave before they have them."""

    prompts: tuple[int, ...] = (12, 20, 60, 200, 400, 700, 1500)
    outputs: tuple[int, ...] = (1, 2, 5, 20, 60, 150, 300)
    long: tuple[int, ...] = (150, 400)


USUAL = Sizes()
#: For an engine whose step takes 50 ms.
SLOW = Sizes(prompts=(12, 60, 200, 500), outputs=(1, 2, 5, 12), long=(60, 120))


@dataclass
class Ask:
    """A request, and how many sequences it makes (0: it is to be refused)."""

    kind: str
    body: Any
    sequences: int = 1
    path: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    sampled: bool = True
    #: What its client does other than wait.
    leaves: dict[str, Any] = field(default_factory=dict)
    by: Callable[..., ClientResult] = send

    def arguments(self) -> dict[str, Any]:
        """What a ship's ``ask`` takes."""
        leaves = {} if self.by is send_half else self.leaves
        about = {"headers": self.headers, "sampled": self.sampled, "by": self.by, "path": self.path}
        return {"body": self.body, **about, **leaves}


def some(percent: int) -> st.SearchStrategy[bool]:
    """True in so many cases; false is simpler."""
    return st.integers(0, 99).map(lambda drawn: drawn >= 100 - percent)


@st.composite
def generated(draw: st.DrawFn, prompts: Callable[[int, int], str], sizes: Sizes = USUAL) -> Ask:
    """A request to a server that generates, with ``--scheduling-policy priority`` and ``--enable-scale-out``."""
    kind = draw(st.sampled_from(GENERATED))
    if kind in ("refused", "half"):
        return _wrong(draw, kind, REFUSED)
    leaves = draw(some(30))
    stream = draw(st.booleans())
    tokens = draw(st.sampled_from(sizes.long if leaves else sizes.outputs))
    # Five texts of each length, so that some of them are in the cache.
    text = prompts(draw(st.sampled_from(sizes.prompts)), draw(st.integers(0, 4)))
    body: dict[str, Any] = {"model": NAME, "temperature": 0.0, "priority": draw(st.integers(-1, 1))}
    ask = Ask(kind, body)
    if kind == "responses":
        ask.path = RESPONSES
        body |= {"input": text, "max_output_tokens": tokens, "stream": stream, "ignore_eos": True}
    elif kind == "messages":
        ask.path = MESSAGES
        del body["priority"]
        body |= {"messages": [{"role": "user", "content": text}], "max_tokens": tokens, "stream": stream}
    elif kind == "token_ids":
        ask.path, stream = TOKEN_IDS, False
        ids = draw(st.lists(st.integers(5, 200), min_size=1, max_size=60))
        body = {"model": NAME, "token_ids": ids, "priority": body["priority"]}
        ask.body = body | {"sampling_params": {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}}
    else:
        _completion(draw, ask, text, tokens, stream, prompts)
    _client(draw, ask, leaves, stream)
    return ask


def _completion(
    draw: st.DrawFn, ask: Ask, text: str, tokens: int, stream: bool, prompts: Callable[[int, int], str]
) -> None:
    """A chat, a completion, or one of several prompts, with what these may be asked for."""
    body = ask.body
    body |= {"max_tokens": tokens, "ignore_eos": True, "stream": stream}
    if ask.kind == "chat":
        body["messages"] = [{"role": "user", "content": text}]
    elif ask.kind == "completion":
        body["prompt"] = text
    else:
        body["prompt"] = [text, *(prompts(20, draw(st.integers(0, 4))) for _ in range(draw(st.integers(1, 2))))]
        ask.sequences = len(body["prompt"])
    if stream and draw(some(70)):
        body["stream_options"] = {"include_usage": True}
    if draw(some(15)):
        body |= {"n": draw(st.integers(2, 3)), "temperature": 0.8}
        ask.sequences *= body["n"]
    wish = draw(st.sampled_from(("", "", "", "", "stop", "choice", "logprobs", "stop_ids")))
    if wish == "stop":
        body["stop"] = [draw(st.sampled_from((" ", "e", "the")))]
    elif wish == "choice":
        body |= {"structured_outputs": {"choice": ["yes", "perhaps"]}, "ignore_eos": False}
    elif wish == "logprobs":
        body |= {"logprobs": True, "top_logprobs": 2} if ask.kind == "chat" else {"logprobs": 2}
    elif wish == "stop_ids":
        body["stop_token_ids"] = list(range(5, 60))


@st.composite
def pooled(draw: st.DrawFn, prompts: Callable[[int, int], str]) -> Ask:
    """A request to a server that embeds."""
    kind = draw(st.sampled_from(POOLED))
    if kind in ("refused", "half"):
        return _wrong(draw, kind, (*NONSENSE, CHAT, {"model": NAME, "prompt": "hello"}), EMBEDDINGS)
    texts = [
        prompts(draw(st.sampled_from((12, 60, 300, 1500))), draw(st.integers(0, 4)))
        for _ in range(draw(st.integers(2, 4)))
    ]
    bodies: dict[str, tuple[str, dict[str, Any], int]] = {
        "embed": (EMBEDDINGS, {"input": texts[0]}, 1),
        "embed_several": (EMBEDDINGS, {"input": texts}, len(texts)),
        "embed_ids": (EMBEDDINGS, {"input": draw(st.lists(st.integers(5, 200), min_size=1, max_size=60))}, 1),
        "pooling": (POOLING, {"input": texts[0]}, 1),
        "score": (SCORE, {"text_1": texts[0], "text_2": texts[1]}, 2),
    }
    path, body, sequences = bodies[kind]
    ask = Ask(kind, {"model": NAME, **body}, sequences, path)
    _client(draw, ask, draw(some(20)), stream=False)
    return ask


def _wrong(draw: st.DrawFn, kind: str, refused: tuple[Any, ...], path: str = COMPLETION) -> Ask:
    """Something that is no request, or the half of one."""
    if kind == "half":
        return Ask(kind, b'{"model": ', path=path, leaves={"while": "sending"}, by=send_half)
    return Ask(kind, draw(st.sampled_from(refused)), sequences=0)


def _client(draw: st.DrawFn, ask: Ask, leaves: bool, stream: bool) -> None:
    """Who asks, and how patient he is."""
    if draw(some(20)):
        ask.headers["X-Request-Id"] = "the-same-for-all"
    ask.sampled = not draw(some(5))
    if leaves and stream and draw(st.booleans()):
        ask.leaves["hang_up_after_chunks"] = draw(st.integers(1, 8))
    elif leaves:
        ask.leaves["hang_up_after_s"] = draw(st.sampled_from(LEAVES_AFTER_S))
