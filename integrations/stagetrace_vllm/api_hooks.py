"""API-server process: stages 1-3, the hand-over of 4, and the front-end half of 10 and 12."""

from __future__ import annotations

from typing import Any

from stagetrace.plugin import (
    HookGroup,
    HookSpec,
    current,
    engine_starts,
    exported_share,
    key_of,
    marks,
    now,
    recorder,
    signed,
)

from . import roots
from .asgi import Shell
from .roots import root_now

#: Texts on their way to a tokenizer thread, by identity: threads of a pool do not inherit context variables.
_tokenizing: dict[int, int] = {}


def engine_building(_instance: Any) -> None:
    """An engine is about to be built: from here on there is something to record."""
    engine_starts()


def shell(_state: Any, _app: Any, stack: Any) -> Any:
    """Put our layer around the application's middleware."""
    return Shell(stack)


def handler_entered(_serving: Any, request: Any) -> None:
    """Body parsed and validated: the request handler begins."""
    root = current.get()
    if root is None:
        return
    root.streams = bool(getattr(request, "stream", False))
    limit = getattr(request, "max_completion_tokens", None) or getattr(request, "max_tokens", None)
    limit = limit or getattr(request, "max_output_tokens", None) or -1
    n = getattr(request, "n", None) or 1
    recorder.mark(marks.HANDLER, root.number, root.received_bytes, root.streams, n, limit)


def render_entered(_renderer: Any, conversations: Any) -> None:
    """Messages are about to be rendered to one string."""
    root = root_now()
    if root is not None:
        recorder.mark(marks.RENDER, root.number, sum(len(c) for c in conversations))


def tokenize_entered(_renderer: Any, prompts: Any) -> tuple[int, list[int]] | None:
    """Text is about to become ids."""
    root = root_now()
    if root is None:
        return None
    texts = [text for p in prompts if isinstance(p, dict) and isinstance(text := p.get("prompt"), str)]
    recorder.mark(marks.TOKENIZE, root.number, sum(map(len, texts)))
    for text in texts:
        _tokenizing[id(text)] = root.number
    return root.number, [id(text) for text in texts]


def tokenize_left(state: tuple[int, list[int]] | None, _renderer: Any, prompts: Any) -> None:
    """Ids are there: count them."""
    if state is None:
        return
    number, texts = state
    counts = [len(p.get("prompt_token_ids") or ()) for p in prompts if isinstance(p, dict)]
    recorder.mark(marks.TOKENIZED, number, sum(counts))
    for text in texts:
        _tokenizing.pop(text, None)


def tokenize_failed(state: tuple[int, list[int]] | None, _renderer: Any, _error: BaseException) -> None:
    """Forget the texts of a tokenisation that raised."""
    for text in state[1] if state else ():
        _tokenizing.pop(text, None)


def tokenizer_took(_renderer: Any, prompt: Any) -> None:
    """A tokenizer thread takes a text up: until now it waited for the pool."""
    root = current.get()
    number = root.number if root else _tokenizing.get(id(prompt.get("prompt"))) if isinstance(prompt, dict) else None
    if number is not None:
        recorder.mark(marks.TOKENIZE_RUN, number)


def handed_over(processor: Any, request: Any, parent_req: Any, request_index: Any) -> None:
    """The engine request exists and is about to be sent: join it to its root."""
    root = root_now() or roots.begin(marks.DIRECT, headers=request.trace_headers)
    sequence = key_of(request.request_id)
    root.sequences.append(sequence)
    prompt = len(request.prompt_token_ids or ())
    params = request.sampling_params
    limit = getattr(params, "max_tokens", None) or 0
    recorder.mark(marks.ADD, root.number, signed(sequence), prompt, limit, request_index or 0)
    recorder.text(marks.INTERNAL_ID, sequence, request.request_id)
    recorder.text(marks.EXTERNAL_ID, root.number, response_id(request, over_http=root.kind == marks.HTTP))
    if params is not None:
        grammar = int(getattr(params, "structured_outputs", None) is not None)
        temperature, top_p = round(params.temperature * 1e6), round(params.top_p * 1e6)
        recorder.mark(marks.SAMPLING, sequence, temperature, top_p, params.top_k, grammar)
    if parent_req is None or (request_index or 0) + 1 >= parent_req.sampling_params.n:
        roots.handed_over()
    # The engine copies these into every output, so only for an engine that makes spans of its own.
    if getattr(processor, "tracing_enabled", False) and (share := exported_share()) is not None:
        request.trace_headers = roots.headers_of(root, share) or request.trace_headers


def response_id(request: Any, over_http: bool) -> str:
    """The id the client is answered with. A completion's prompts are numbered behind it: ``cmpl-X-0``."""
    external: str = getattr(request, "external_req_id", None) or request.request_id
    return external.rpartition("-")[0] if over_http and external.startswith("cmpl-") else external


def outputs_entered(_processor: Any, outputs: Any, timestamp: Any) -> tuple[int, int, int]:
    """A batch of the engine's outputs is about to be detokenised."""
    return now(), int((timestamp or 0.0) * 1e9), len(outputs)


def outputs_left(state: tuple[int, int, int], _processor: Any, result: Any) -> None:
    """Outputs detokenised and queued for their clients; stop strings were seen on the way."""
    entered, stamp, rows = state
    recorder.mark(marks.OUTPUTS, 0, entered, now(), stamp, rows)
    for identifier in result.reqs_to_abort:
        recorder.mark(marks.STOPPED, key_of(identifier))


def aborting(processor: Any, request_ids: Any, internal: Any) -> Any:
    """The front end gives requests up. ``request_ids`` may be any iterable: only re-iterable ones are read."""
    if not isinstance(request_ids, list | tuple | set):
        return
    for identifier in request_ids:
        names = [identifier] if internal else processor.external_req_ids.get(identifier, ())
        for name in names:
            recorder.mark(marks.ABORTED, key_of(name))


_CHAT = "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat.create_chat_completion"
_COMPLETION = "vllm.entrypoints.openai.completion.serving:OpenAIServingCompletion.create_completion"
_RENDERER = "vllm.renderers.base:BaseRenderer"
_OUTPUTS = "vllm.v1.engine.output_processor:OutputProcessor"


def _tokenizes(method: str, awaits: bool) -> HookSpec:
    return HookSpec(
        f"{_RENDERER}.{method}", tokenize_entered, tokenize_left, tokenize_failed, takes=("prompts",), awaits=awaits
    )


def _offline_call(method: str) -> HookSpec:
    return HookSpec(
        f"vllm.entrypoints.llm:LLM.{method}", roots.offline_entered, roots.offline_left, roots.offline_failed
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
                 roots.direct_failed, takes=("request_id", "prompt", "trace_headers"), awaits=True),
    )),
    HookGroup("direct_offline", (), (
        HookSpec("vllm.v1.engine.llm_engine:LLMEngine.add_request", roots.direct_entered, roots.direct_left,
                 roots.direct_failed, takes=("request_id", "prompt", "trace_headers")),
    )),
    HookGroup("direct_prompt", (), (
        HookSpec("vllm.v1.engine.input_processor:InputProcessor.process_inputs", roots.prompt_entered,
                 roots.prompt_left, roots.prompt_left, takes=("request_id",)),
    ), optional=True),
    HookGroup("http", ("http_receive", "detokenize", "teardown"), (
        HookSpec("fastapi.applications:FastAPI.build_middleware_stack", leave=shell, replaces=True, pausable=False),
    )),
    HookGroup("chat", ("http_receive",), (HookSpec(_CHAT, handler_entered, takes=("request",)),)),
    HookGroup("completion", ("http_receive",), (HookSpec(_COMPLETION, handler_entered, takes=("request",)),)),
    HookGroup("render", ("chat_template", "tokenize"), (
        HookSpec(f"{_RENDERER}.render_chat_async", render_entered, takes=("conversations",)),
        HookSpec(f"{_RENDERER}.render_chat", render_entered, takes=("conversations",)),
        _tokenizes("tokenize_prompts_async", awaits=True),
        _tokenizes("tokenize_prompts", awaits=False),
    )),
    HookGroup("tokenizer_pool", (), (
        HookSpec(f"{_RENDERER}._tokenize_prompt", tokenizer_took, takes=("prompt",)),
    ), optional=True),
    HookGroup("join", ("admission", "detokenize", "decode", "teardown"), (
        HookSpec(f"{_OUTPUTS}.add_request", handed_over, takes=("request", "parent_req", "request_index")),
        HookSpec(f"{_OUTPUTS}.process_outputs", outputs_entered, outputs_left,
                 takes=("engine_core_outputs", "engine_core_timestamp")),
        HookSpec(f"{_OUTPUTS}.abort_requests", aborting, takes=("request_ids", "internal")),
    )),
    HookGroup("offline", ("teardown",), (
        _offline_call("generate"),
        _offline_call("chat"),
    )),
)  # fmt: skip
