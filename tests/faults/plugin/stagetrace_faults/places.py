"""Where a server can be made slow: inside each of the twelve stages, and in three stretches that belong to none.

What is patched is the engine's own work, as deep inside a stage as it can be reached, and never a function that bounds
the stage for stagetrace: that the two agree is what the bench shows.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import calls
from .calls import Who


@dataclass(frozen=True)
class Seam:
    """A method that is delayed: before it does its work or, with ``after``, when it has done it."""

    target: str
    who: Who
    after: bool = False


@dataclass(frozen=True)
class Place:
    """``lands`` is the stage, or ``unattributed``; ``part`` what of it must show the delay, too.

    A stage's part is one of its attributes (``split_ms.`` of decode's), that of ``unattributed`` the gap's name.
    A request meets it once, or with ``per_token`` once for each further token.
    """

    name: str
    lands: str
    seams: tuple[Seam, ...]
    part: str = ""
    per_token: bool = False


_TOKENIZER = "transformers.tokenization_utils_base:PreTrainedTokenizerBase"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_BLOCKS = "vllm.v1.core.kv_cache_manager:KVCacheManager"
_COORDINATOR = "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator"
_MULTIPROC = "vllm.v1.executor.multiproc_executor"
_UNIPROC = "vllm.v1.executor.uniproc_executor:UniProcExecutor"
_ATTENTION = "vllm.model_executor.layers.attention.attention:Attention.forward"
_EMBEDDING = "vllm.model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod.embedding"
_LOGITS = "vllm.model_executor.layers.logits_processor:LogitsProcessor.forward"
_UVICORN = "uvicorn.protocols.http"
_FIRST, _FURTHER = False, True


def _sampler(further: bool) -> tuple[Seam, ...]:
    """Both model runners' samplers."""
    who = calls.in_step(further)
    return (
        Seam("vllm.v1.sample.sampler:Sampler.sample", who),
        Seam("vllm.v1.worker.gpu.sample.sampler:Sampler.sample", who),
    )


def _hand_over(further: bool) -> tuple[Seam, ...]:
    """A composed step on its way to the worker."""
    who = calls.composed(further)
    return Seam(f"{_MULTIPROC}:MultiprocExecutor.execute_model", who), Seam(f"{_UNIPROC}.execute_model", who)


def _send(who: Who) -> tuple[Seam, ...]:
    return tuple(Seam(f"{_UVICORN}.{name}_impl:RequestResponseCycle.send", who) for name in ("httptools", "h11"))


_ALL = (
    Place("http_receive", "http_receive", (Seam("starlette.requests:Request.json", calls.of_api),)),
    Place("chat_template", "chat_template", (Seam(f"{_TOKENIZER}.apply_chat_template", calls.of_api),)),
    Place("tokenize", "tokenize", (Seam(f"{_TOKENIZER}.__call__", calls.of_api),)),
    Place(
        "engine_input", "unattributed",
        (Seam("vllm.v1.engine.input_processor:InputProcessor._validate_params", calls.of_api),), "engine_input",
    ),
    Place(
        "admission.hand_off", "admission",
        (Seam("vllm.v1.engine.core:EngineCore.add_request", calls.of_request),), "hand_off_ms",
    ),
    Place(
        "admission", "admission",
        (Seam("vllm.v1.core.sched.request_queue:FCFSRequestQueue.add_request", calls.of_request),), "wait_ms",
    ),
    Place(
        "kv_allocate.lookup", "kv_allocate",
        (Seam(f"{_BLOCKS}.prefix_cache_lookup_enabled", calls.of_request_once),),
    ),
    Place("kv_allocate", "kv_allocate", (Seam(f"{_COORDINATOR}.allocate_new_blocks", calls.of_request_once),)),
    Place("dispatch", "unattributed", _hand_over(_FIRST), "dispatch"),
    Place("embedding", "embedding", (Seam(_EMBEDDING, calls.in_step(_FIRST)),)),
    Place("prefill", "prefill", (Seam(_ATTENTION, calls.in_step(_FIRST)),)),
    Place("lm_head", "lm_head", (Seam(_LOGITS, calls.in_step(_FIRST)),)),
    Place("sample", "sample", _sampler(_FIRST)),
    Place(
        "result", "unattributed",
        (
            Seam(f"{_MULTIPROC}:WorkerProc.enqueue_output", calls.returned(_FIRST)),
            Seam(f"{_UNIPROC}.sample_tokens", calls.in_step(_FIRST), after=True),
        ),
        "result",
    ),
    Place(
        "detokenize.hand_back", "detokenize",
        (Seam(f"{_SCHEDULER}._update_request_with_output", calls.of_first_booking),), "hand_back_ms",
    ),
    Place(
        "detokenize", "detokenize",
        (Seam("vllm.v1.engine.detokenizer:BaseIncrementalDetokenizer.update", calls.of_first_text),), "detokenize_ms",
    ),
    Place("detokenize.emit", "detokenize", _send(calls.of_first_send), "emit_ms"),
    Place(
        "decode.schedule", "decode",
        (Seam(f"{_SCHEDULER}._update_after_schedule", calls.composed(_FURTHER)),), "split_ms.schedule", True,
    ),
    Place("decode.dispatch", "decode", _hand_over(_FURTHER), "split_ms.dispatch", True),
    Place(
        "decode.prepare", "decode",
        (
            Seam("vllm.v1.worker.gpu_model_runner:GPUModelRunner._prepare_inputs", calls.in_step(_FURTHER)),
            Seam("vllm.v1.worker.gpu.model_runner:GPUModelRunner.prepare_inputs", calls.in_step(_FURTHER)),
        ),
        "split_ms.prepare", True,
    ),
    Place("decode", "decode", (Seam(_ATTENTION, calls.in_step(_FURTHER)),), "split_ms.forward", True),
    Place("decode.lm_head", "decode", (Seam(_LOGITS, calls.in_step(_FURTHER)),), "split_ms.lm_head", True),
    Place("decode.sample", "decode", _sampler(_FURTHER), "split_ms.sample", True),
    Place(
        "decode.update", "decode",
        (Seam(f"{_SCHEDULER}._update_request_with_output", calls.of_further_booking),), "split_ms.update", True,
    ),
    Place("teardown", "teardown", (Seam(f"{_BLOCKS}.free", calls.of_request),)),
    Place("teardown.send", "teardown", _send(calls.of_last_send)),
)  # fmt: skip

PLACES = {place.name: place for place in _ALL}
#: One for each stage, and three that belong to none; the other places are parts of these.
STAGES = tuple(p.name for p in _ALL if p.name == p.lands)
GAPS = tuple(p.name for p in _ALL if p.lands == "unattributed")
