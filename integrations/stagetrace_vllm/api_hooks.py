"""API-server process: stages 1-3, the hand-over of 4, and the front-end half of 10 and 12."""

from __future__ import annotations

import re
from typing import Any

from stagetrace.plugin import (
    Entered,
    HookGroup,
    HookSpec,
    Root,
    current,
    engine_starts,
    enter,
    exported_share,
    key_of,
    marks,
    now,
    recorder,
    signed,
)

from . import roots
from .asgi import Shell
from .held import hold, parts, release, root_of
from .roots import root_now

#: Longest id that is kept: a client's own, at most 128, with what the engine puts around it.
ID_CHARACTERS = 160
#: A call, and what it holds until it is released.
Held = tuple[Root, list[int]]
#: What a beam search adds to the id of the request it belongs to.
_BEAM = re.compile(r"-[0-9a-f]+-beam-\d+$")


def engine_building(_instance: Any) -> None:
    """An engine is about to be built: from here on there is something to record."""
    engine_starts()


def shell(_state: Any, _app: Any, stack: Any) -> Any:
    """Put our layer around the application's middleware."""
    return Shell(stack)


def handler_entered(_serving: Any, request: Any) -> None:
    """Body parsed and validated: the request handler begins."""
    root = current.get()
    if root is None or root.handled:  # some handlers work by calling another one
        return
    root.handled = True
    root.streams = bool(getattr(request, "stream", False))
    limit = getattr(request, "max_completion_tokens", None) or getattr(request, "max_tokens", None)
    limit = limit or getattr(request, "max_output_tokens", None) or -1
    n = getattr(request, "n", None) or 1
    recorder.mark(marks.HANDLER, root.number, root.received_bytes, root.streams, n, limit)
    if getattr(request, "background", None):
        recorder.mark(marks.BACKGROUND, root.number)


def pooling_entered(serving: Any, request: Any) -> Held | None:
    """The handler of what is pooled: it renders in threads, one prompt at a time."""
    handler_entered(serving, request)
    root = current.get()
    return None if root is None else (root, hold(root, parts(request)))


def let_go(state: Held | None) -> None:
    """Another call's text may get the place of this one's in memory, and must not be taken for it."""
    if state is not None:
        release(*state)


def render_entered(_renderer: Any, conversations: Any) -> Entered | None:
    """Messages are about to be rendered to one string."""
    root = root_now()
    found = root or root_of(conversations)
    if found is None:
        return None
    recorder.mark(marks.RENDER, found.number, sum(len(c) for c in conversations))
    return enter(found) if root is None else None


def tokenize_entered(_renderer: Any, prompts: Any) -> Held | None:
    """Text is about to become ids."""
    given = [p for p in prompts if isinstance(p, dict)]
    texts = [text for p in given if isinstance(text := p.get("prompt"), str)]
    root = root_now() or root_of([*texts, *(p.get("prompt_token_ids") for p in given)])
    if root is None:
        return None
    recorder.mark(marks.TOKENIZE, root.number, sum(map(len, texts)))
    return root, hold(root, texts)


def tokenize_left(state: Held | None, _renderer: Any, prompts: Any) -> None:
    """Ids are there: count them."""
    if state is None:
        return
    counts = [len(ids) for p in prompts if isinstance(p, dict) and (ids := p.get("prompt_token_ids")) is not None]
    recorder.mark(marks.TOKENIZED, state[0].number, sum(counts) if len(counts) == len(prompts) else -1)


def tokenizer_took(_renderer: Any, prompt: Any) -> None:
    """A tokenizer thread takes a text up: until now it waited for the pool."""
    root = current.get() or (root_of([prompt.get("prompt")]) if isinstance(prompt, dict) else None)
    if root is not None:
        recorder.mark(marks.TOKENIZE_RUN, root.number)


def handed_over(processor: Any, request: Any, parent_req: Any, request_index: Any) -> None:
    """The engine request exists and is about to be sent: join it to its root."""
    root = roots.root_of(request)
    sequence = key_of(request.request_id)
    if roots.in_pieces() and sequence in root.sequences:
        return
    root.sequences.append(sequence)
    params = request.sampling_params
    limit = -1 if params is None else params.max_tokens or 0
    recorder.mark(marks.ADD, root.number, signed(sequence), prompt_tokens(request), limit, request_index or 0)
    _name(marks.INTERNAL_ID, sequence, request.request_id)
    _name(marks.EXTERNAL_ID, root.number, response_id(request, root))
    if params is not None:
        grammar = int(getattr(params, "structured_outputs", None) is not None)
        temperature, top_p = round(params.temperature * 1e6), round(params.top_p * 1e6)
        recorder.mark(marks.SAMPLING, sequence, temperature, top_p, params.top_k, grammar)
    if parent_req is None or (request_index or 0) + 1 >= parent_req.sampling_params.n:
        roots.handed_over()
    # The engine copies these into every output, so only for an engine that makes spans of its own.
    if getattr(processor, "tracing_enabled", False):
        request.trace_headers = roots.headers_of(root, exported_share()) or request.trace_headers


def prompt_tokens(request: Any) -> int:
    """Positions of the prompt: its ids, or the embeddings that came instead; -1 where there are neither."""
    embeds = getattr(request, "prompt_embeds", None)
    given = request.prompt_token_ids if request.prompt_token_ids is not None else embeds
    return -1 if given is None else len(given)


def response_id(request: Any, root: Root) -> str:
    """The id the client is answered with. Of several prompts, beams or turns each has an id made from it."""
    external: str = getattr(request, "external_req_id", None) or request.request_id
    if root.kind != marks.HTTP:
        return external
    answered = _BEAM.sub("", external)
    if answered == external and root.numbered:
        answered, _, last = external.rpartition(root.numbered)
        return answered if last.isdecimal() else external
    return answered


def _name(field: int, key: int, identifier: str) -> None:
    """Keep an id. A client may have chosen it: one that is over-long or unprintable is nobody's name."""
    if len(identifier) <= ID_CHARACTERS and identifier.isprintable():
        recorder.text(field, key, identifier)


def outputs_entered(_processor: Any, outputs: Any, timestamp: Any) -> tuple[int, int, int]:
    """A batch of the engine's outputs is about to be detokenised."""
    return now(), int((timestamp or 0.0) * 1e9), len(outputs)


def outputs_left(state: tuple[int, int, int], _processor: Any, result: Any) -> None:
    """Outputs detokenised and queued for their clients; stop strings were seen on the way."""
    entered, stamp, rows = state
    recorder.mark(marks.OUTPUTS, 0, entered, now(), stamp, rows)
    for identifier in result.reqs_to_abort:
        recorder.mark(marks.STOPPED, key_of(identifier))


def finished(_processor: Any, state: Any, reason: Any) -> None:
    """What the client is told: a stop string may be complete with the very token that the engine ends with anyway."""
    recorder.mark(marks.FINISHED, key_of(state.request_id), marks.finish_code(reason))


def aborting(processor: Any, request_ids: Any, internal: Any) -> Any:
    """The front end gives requests up. ``request_ids`` may be any iterable: only re-iterable ones are read."""
    if not isinstance(request_ids, list | tuple | set):
        return
    for identifier in request_ids:
        names = [identifier] if internal else processor.external_req_ids.get(identifier, ())
        for name in names:
            recorder.mark(marks.ABORTED, key_of(name))


_OPENAI = "vllm.entrypoints.openai"
_POOLING = "vllm.entrypoints.pooling.base.serving"
_RENDERER = "vllm.renderers.base:BaseRenderer"
_OUTPUTS = "vllm.v1.engine.output_processor:OutputProcessor"


def _tokenizes(method: str, awaits: bool) -> HookSpec:
    return HookSpec(
        f"{_RENDERER}.{method}", tokenize_entered, tokenize_left, done=let_go, takes=("prompts",), awaits=awaits
    )


def _handler(name: str, target: str, *otherwise: str, stages: tuple[str, ...] = ()) -> HookGroup:
    """The entry of a request handler, where stage 1 ends. Without those of chat and completions, that stage is lost."""
    return HookGroup(name, stages, (HookSpec(target, handler_entered, takes=("request",), otherwise=otherwise),))


def _offline_call(method: str) -> HookSpec:
    return HookSpec(
        f"vllm.entrypoints.llm:LLM.{method}",
        roots.offline_entered,
        roots.offline_left,
        roots.offline_failed,
        roots.offline_done,
    )


GROUPS = (
    HookGroup("build", (), (
        HookSpec("vllm.v1.engine.async_llm:AsyncLLM.__init__", engine_building, pausable=False),
    )),
    HookGroup("build_offline", (), (
        HookSpec("vllm.v1.engine.llm_engine:LLMEngine.__init__", engine_building, pausable=False),
    )),
    HookGroup("direct", (), (
        HookSpec("vllm.v1.engine.async_llm:AsyncLLM.add_request", roots.direct_entered, roots.direct_left,
                 roots.direct_failed, roots.direct_done, takes=("request_id", "prompt", "trace_headers"), awaits=True),
    )),
    HookGroup("direct_offline", (), (
        HookSpec("vllm.v1.engine.llm_engine:LLMEngine.add_request", roots.direct_entered, roots.direct_left,
                 roots.direct_failed, roots.direct_done, takes=("request_id", "prompt", "trace_headers")),
    )),
    HookGroup("direct_prompt", (), (
        HookSpec("vllm.v1.engine.input_processor:InputProcessor.process_inputs", roots.prompt_entered,
                 done=roots.prompt_done, takes=("request_id",)),
    ), optional=True),
    HookGroup("http", ("http_receive", "chat_template", "tokenize", "detokenize", "decode", "teardown"), (
        HookSpec(roots.APPLICATION, leave=shell, replaces=True, pausable=False),
    )),
    _handler("chat", f"{_OPENAI}.chat_completion.serving:OpenAIServingChat.create_chat_completion",
             stages=("http_receive",)),
    _handler("completion", f"{_OPENAI}.completion.serving:OpenAIServingCompletion.create_completion",
             stages=("http_receive",)),
    _handler("responses", f"{_OPENAI}.responses.serving:OpenAIServingResponses.create_responses"),
    _handler("messages", "vllm.entrypoints.anthropic.serving:AnthropicServingMessages.create_messages"),
    _handler("token_ids", "vllm.entrypoints.scale_out.token_in_token_out.serving:ServingTokens.serve_tokens",
             "vllm.entrypoints.serve.disagg.serving:ServingTokens.serve_tokens"),
    HookGroup("pooling", (), (
        HookSpec(f"{_POOLING}:PoolingBaseServing.__call__", pooling_entered, done=let_go,
                 takes=("request",), awaits=True, otherwise=(
                     f"{_POOLING}:PoolingServingBase.__call__", f"{_POOLING}:PoolingServing.__call__",
                 )),
    )),
    HookGroup("render", ("chat_template", "tokenize"), (
        HookSpec(f"{_RENDERER}.render_chat_async", render_entered, takes=("conversations",)),
        HookSpec(f"{_RENDERER}.render_chat", render_entered, done=roots.prompt_done, takes=("conversations",)),
        _tokenizes("tokenize_prompts_async", awaits=True),
        _tokenizes("tokenize_prompts", awaits=False),
    )),
    HookGroup("tokenizer_pool", (), (
        HookSpec(f"{_RENDERER}._tokenize_prompt", tokenizer_took, takes=("prompt",)),
    ), optional=True),
    HookGroup("join", (
        "admission", "kv_allocate", "embedding", "prefill", "lm_head", "sample", "detokenize", "decode", "teardown",
    ), (
        HookSpec(roots.HAND_OVER, handed_over, takes=("request", "parent_req", "request_index")),
        HookSpec(f"{_OUTPUTS}.process_outputs", outputs_entered, outputs_left,
                 takes=("engine_core_outputs", "engine_core_timestamp")),
        HookSpec(f"{_OUTPUTS}.abort_requests", aborting, takes=("request_ids", "internal")),
    )),
    HookGroup("finish_reason", (), (
        HookSpec(f"{_OUTPUTS}._update_stats_from_finished", finished, takes=("req_state", "finish_reason")),
    ), optional=True),
    HookGroup("offline", ("teardown",), (
        _offline_call("generate"),
        _offline_call("chat"),
    )),
)  # fmt: skip
