"""Engine-core process: admission, KV blocks, the composition of every step, and the end of a request.

What runs once per step must not grow with the batch: in steady decode the batch is the same list of the same ids,
and comparing two such lists is one identity check per member in C. Only changes are written.
"""

from __future__ import annotations

from typing import Any

from stagetrace.plugin import HookGroup, HookSpec, key_of, marks, now, number, recorder

from .model_facts import model_facts

#: Up to so many members are looked for in the batch one by one; for more, it is worth an index.
FEW = 4


class Batch:
    """What the last step was made of; lives on the scheduler."""

    def __init__(self) -> None:
        # The upper half tells engines apart, the lower half counts steps.
        self.step = number() & 0x7FFFFFFF_00000000
        self.ids: list[str] = []
        self.members: set[str] = set()
        #: Those of them that ran other than one token.
        self.others: set[str] = set()
        self.steady = False
        #: What waited and what the cache held when nothing ran; None while something does.
        self.idle: tuple[int, int] | None = None


def scheduler_built(_state: Any, scheduler: Any, _result: Any) -> None:
    """Write down the settings that numbers mean nothing without: an allow-list, never argv or environment."""
    scheduler._stagetrace = Batch()
    try:
        for key, value in settings(scheduler).items():
            if value is not None:
                recorder.text(marks.ENGINE, 0, f"{key}={value}")
    except Exception as error:  # a setting that moved must not cost us the requests
        recorder.text(marks.ENGINE, 0, f"settings_error={type(error).__name__}")
    try:
        for key, value in model_facts(scheduler.vllm_config):
            recorder.text(marks.ENGINE, 0, f"{key}={value}")
    except Exception as error:
        recorder.text(marks.ENGINE, 0, f"model_config_error={type(error).__name__}")


def settings(scheduler: Any) -> dict[str, Any]:
    """Allow-listed configuration of the engine that owns ``scheduler``."""
    config = scheduler.vllm_config
    kv = scheduler.kv_cache_config
    model, sched, parallel = config.model_config, config.scheduler_config, config.parallel_config
    served = model.served_model_name
    tensors = getattr(kv, "kv_cache_tensors", None) or ()
    blocks = kv.num_blocks
    from vllm import __version__

    return {
        "engine": "vllm",
        "engine_version": __version__,
        "model": served[0] if isinstance(served, list | tuple) else served,
        "block_size": getattr(scheduler, "block_size", None) or config.cache_config.block_size,
        "kv_blocks": blocks,
        "kv_block_bytes": sum(t.size for t in tensors) // blocks if blocks and tensors else None,
        "prefix_caching": int(bool(config.cache_config.enable_prefix_caching)),
        "chunked_prefill": int(bool(getattr(sched, "enable_chunked_prefill", True))),
        "max_num_seqs": sched.max_num_seqs,
        "max_num_batched_tokens": sched.max_num_batched_tokens,
        "max_model_len": model.max_model_len,
        "vocabulary": model.get_vocab_size(),
        "async_scheduling": int(bool(getattr(sched, "async_scheduling", False))),
        "executor": str(parallel.distributed_executor_backend),
        "device": str(config.device_config.device_type),
        "tensor_parallel": parallel.tensor_parallel_size,
        "pipeline_parallel": parallel.pipeline_parallel_size,
        "data_parallel": parallel.data_parallel_size,
        "expert_parallel": int(bool(getattr(parallel, "enable_expert_parallel", False))),
        "speculative": int(config.speculative_config is not None),
        "engine_index": getattr(parallel, "data_parallel_index", 0),
    }


def arrived(core: Any, request: Any) -> None:
    """An engine request has been decoded on the input thread."""
    if request.request_id in core.scheduler.requests:  # another piece of a request that comes in pieces
        return
    recorder.mark(marks.ARRIVE, key_of(request.request_id))


def enqueued(scheduler: Any, request: Any) -> None:
    """The scheduler takes the request into its queue; of one that comes in pieces, again for each, and at its end."""
    known = scheduler.requests.get(request.request_id)
    if known is not None:
        # Nothing more will come, and it waits for that: the engine ends it now, as if it had been aborted.
        waits = known.status.name == "WAITING_FOR_STREAMING_REQ"
        known._stagetrace_over = waits and not request.resumable
        return
    running, waiting = scheduler.get_request_counts()
    recorder.mark(marks.ENQUEUE, key_of(request.request_id), waiting, running, compiling(request))


def compiling(request: Any) -> bool:
    """Whether the grammar of a structured output is still being made, in a thread of the engine's.

    Asked of the future itself: the engine's own properties take the result out of it.
    """
    done = getattr(getattr(getattr(request, "structured_output_request", None), "_grammar", None), "done", None)
    return done is not None and not done()


def looked_up(_manager: Any, request: Any) -> None:
    """The prefix cache is searched for a request that may be admitted; repeated while there is no room for it."""
    recorder.mark(marks.LOOKUP, key_of(request.request_id))


def assigned(_state: Any, _manager: Any, _blocks: Any) -> None:
    """Blocks are there."""
    recorder.mark(marks.BLOCKS, _state)


def assigning(_manager: Any, request_id: Any) -> int:
    """Whose blocks are being read off: on the usual path, an admitted request's."""
    return key_of(request_id)


def schedule_entered(_scheduler: Any) -> int:
    """A step begins."""
    return now()


def scheduled(entered: int, scheduler: Any, output: Any) -> None:
    """A step is composed: write its size, and who joined, left or runs other than one token."""
    counts = output.num_scheduled_tokens
    try:
        batch: Batch = scheduler._stagetrace
    except AttributeError:  # its building went unseen
        batch = scheduler._stagetrace = Batch()
    running, waiting = scheduler.get_request_counts()
    usage = round(scheduler.kv_cache_manager.usage * 1_000_000)
    # Of empty steps only what they change: without the one after the last request, gauges would show it for ever.
    # Where somebody runs all the same, his token is still on its way, and another step comes soon.
    idle = None if counts else (waiting, usage)
    if idle and (running or idle == batch.idle):
        return
    batch.idle = idle
    batch.step += 1
    output._stagetrace_step = batch.step
    total = output.total_num_scheduled_tokens
    size = len(counts)
    recorder.mark(marks.STEP, batch.step, entered, size | total << 32, running | waiting << 32, usage)
    ids = output.scheduled_cached_reqs.req_ids
    one_each = total == size == len(ids)
    if one_each and batch.steady and ids == batch.ids:
        return
    changes(scheduler, batch, output)
    batch.ids = list(ids)
    batch.steady = one_each


def changes(scheduler: Any, batch: Batch, output: Any) -> None:
    """Write the difference between this step's members and the last one's.

    On a busy server somebody joins or leaves in most steps. So whoever has not changed is left to operations on whole
    sets, which never look at a member.
    """
    counts = output.num_scheduled_tokens
    fresh = {data.req_id: data for data in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    members = set(counts)
    others = not_one(counts, output.total_num_scheduled_tokens, fresh)
    changed = (members - batch.members) | others | fresh.keys() | (batch.others & members)
    few = len(changed) - len(fresh) <= FEW
    position = cached.req_ids.index if few else {name: i for i, name in enumerate(cached.req_ids)}.__getitem__
    for identifier in changed:
        request = scheduler.requests.get(identifier)
        if request is None:
            continue
        tokens = counts[identifier]
        data = fresh.get(identifier)
        given = data.block_ids if data else cached.new_block_ids[position(identifier)]
        blocks = sum(len(group) for group in given or ())
        computed = request.num_computed_tokens - tokens
        prefill = int(computed < request.num_prompt_tokens)
        recorder.mark(marks.JOIN, key_of(identifier), batch.step, tokens, computed, blocks | prefill << 32)
    for identifier in batch.members - members:
        recorder.mark(marks.LEAVE, key_of(identifier), batch.step)
    batch.members, batch.others = members, others


def not_one(counts: dict[str, int], total: int, fresh: dict[str, Any]) -> set[str]:
    """Who runs other than one token; as a rule nobody but those just admitted, and the totals tell."""
    if total == len(counts):
        return set()
    if total - sum(counts[name] for name in fresh) == len(counts) - len(fresh):
        return {name for name in fresh if counts[name] != 1}
    return {name for name, tokens in counts.items() if tokens != 1}


def update_entered(_scheduler: Any, output: Any) -> tuple[int, Any]:
    """The model's output for exactly this composition is back."""
    return now(), output


def updated(state: tuple[int, Any], _scheduler: Any, result: Any) -> None:
    """Tokens are booked; only speculative decoding gives a row other than one."""
    entered, output = state
    step = getattr(output, "_stagetrace_step", None)
    if step is None:
        return
    rows = 0
    for batch in result.values():
        rows += len(batch.outputs)
        if output.scheduled_spec_decode_tokens:
            for row in batch.outputs:
                if len(row.new_token_ids) != 1:
                    recorder.mark(marks.TOKENS, key_of(row.request_id), step, len(row.new_token_ids))
    recorder.mark(marks.UPDATE, step, entered, rows)


def preempted(_scheduler: Any, request: Any) -> None:
    """A running request loses its blocks."""
    recorder.mark(marks.PREEMPT, key_of(request.request_id))


def freeing(scheduler: Any, request: Any) -> tuple[int, Any, int, int]:
    """A request has ended, and its teardown begins: count its blocks while it still holds them."""
    manager = scheduler.kv_cache_manager
    held = sum(len(group) for group in manager.coordinator.get_blocks(request.request_id))
    return now(), request, held, manager.block_pool.get_num_free_blocks()


def freed(state: tuple[int, Any, int, int], scheduler: Any, _result: Any) -> None:
    """Its blocks are back in the pool, or kept there for reuse."""
    ended, request, held, before = state
    manager = scheduler.kv_cache_manager
    given_back = manager.block_pool.get_num_free_blocks() - before
    # A full block stays findable by its hash until somebody else needs it.
    kept = min(len(request.block_hashes), held) if manager.enable_caching else 0
    reason = request.get_finished_reason()
    code = 0 if getattr(request, "_stagetrace_over", False) else marks.finish_code(reason)
    # The engine counts those since the last piece came.
    tokens = -1 if getattr(request, "streaming_queue", None) is not None else request.num_output_tokens
    recorder.mark(marks.FREE, key_of(request.request_id), code, tokens, held | kept << 32, given_back, t=ended)


_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_BLOCKS = "vllm.v1.core.kv_cache_manager:KVCacheManager"

GROUPS = (
    HookGroup("arrive", (), (
        HookSpec("vllm.v1.engine.core:EngineCore.preprocess_add_request", arrived, takes=("request",)),
    )),
    HookGroup("schedule", (
        "admission", "embedding", "prefill", "lm_head", "sample", "detokenize", "decode", "teardown",
    ), (
        HookSpec(f"{_SCHEDULER}.__init__", leave=scheduler_built, pausable=False),
        HookSpec(f"{_SCHEDULER}.add_request", enqueued, takes=("request",)),
        HookSpec(f"{_SCHEDULER}.schedule", schedule_entered, scheduled),
        HookSpec(f"{_SCHEDULER}.update_from_output", update_entered, updated, takes=("scheduler_output",)),
        HookSpec(f"{_SCHEDULER}._free_request", freeing, freed, takes=("request",)),
    )),
    HookGroup("preempt", (), (
        HookSpec(f"{_SCHEDULER}._preempt_request", preempted, takes=("request",)),
    )),
    HookGroup("kv", ("admission", "kv_allocate"), (
        HookSpec(f"{_BLOCKS}.get_computed_blocks", looked_up, takes=("request",)),
        HookSpec(f"{_BLOCKS}.get_blocks", assigning, assigned, takes=("request_id",)),
    )),
)  # fmt: skip
