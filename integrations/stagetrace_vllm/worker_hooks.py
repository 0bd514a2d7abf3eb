"""Worker process (or the engine core itself, with one GPU): what a step's time was spent on.

Only steps that the engine's hooks have stamped, and that have tokens in them, are timed: warm-up, dummy runs and the
capture of graphs carry no stamp. One worker reports, the first of the last pipeline stage, which is the one that
samples. On a GPU a call returns before its work is done: that is timed by events, see :mod:`.worker_events`.
"""

from __future__ import annotations

from typing import Any

from stagetrace.plugin import Guard, HookGroup, HookSpec, Point, marks, now, recorder, report

from .worker_events import output_entered, output_left, step

_handles: list[Any] = []
_WORKER = "vllm.v1.worker.gpu_worker:Worker"
_LOAD = f"{_WORKER}.load_model"
#: For what PyTorch calls: it would pass on to the model what our functions raise.
guard = Guard(_LOAD, report)


def reports(worker: Any) -> bool:
    """Whether this worker is the one whose times stand for its step."""
    parallel = worker.parallel_config
    last_stage = (parallel.pipeline_parallel_size - 1) * parallel.tensor_parallel_size
    return bool(worker.rank % parallel.world_size == last_stage)


def execute_entered(worker: Any, output: Any) -> int:
    """A step reaches the worker."""
    stamp = getattr(output, "_stagetrace_step", None)
    timed = stamp is not None and output.total_num_scheduled_tokens and reports(worker)
    step.begin(stamp if timed else None, worker.device)
    return now()


def execute_left(entered: int, _worker: Any, result: Any) -> None:
    """The model has been run, or on a GPU launched; a result here means that nothing is sampled."""
    step.call(marks.EXECUTE, entered)
    if result is not None:
        step.over(result)


def sample_call_entered(_worker: Any) -> int:
    """The engine asks for the sampled tokens."""
    return now()


def sample_call_left(entered: int, _worker: Any, result: Any) -> None:
    """Sampled; the step is over for this worker."""
    step.call(marks.SAMPLE_CALL, entered)
    step.over(result)


def v1_forward_entered(_runner: Any) -> Point:
    """V1 runner: the model is called."""
    return step.point()


def v1_forward_left(entered: Point, _runner: Any, _result: Any) -> None:
    """V1 runner: hidden states are there; what follows up to the return is the head."""
    step.head = step.point()
    step.span(marks.FORWARD, entered, step.head)


def v1_execute_left(_state: Any, _runner: Any, result: Any) -> None:
    """V1 runner: logits are there (a result here means there were none to make)."""
    if result is None and step.head:
        step.span(marks.LM_HEAD, step.head, step.point())
    step.head = None


def sampler_entered(_runner: Any) -> Point:
    """The sampler is called."""
    return step.point()


def sampler_left(entered: Point, _runner: Any, _result: Any) -> None:
    """One id per sequence is drawn."""
    step.span(marks.SAMPLE, entered, step.point())


def v2_forward_entered(*_: Any) -> None:
    """V2 runner: inputs are ready, the model or its graph is about to run."""
    step.forward = step.point()


def v2_execute_left(_state: Any, _runner: Any, _result: Any) -> None:
    """V2 runner: nothing but the forward lies between its start and the return."""
    if step.forward:
        step.span(marks.FORWARD, step.forward, step.point())
    step.forward = None


def v2_head_entered(_runner: Any) -> None:
    """V2 runner: from here to the sampler's call it is the head."""
    step.head = step.point()


def v2_sampler_entered(_sampler: Any) -> Point:
    """V2 runner: logits are there, the sampler is called."""
    entered = step.point()
    if step.head:
        step.span(marks.LM_HEAD, step.head, entered)
    step.head = None
    return entered


def model_loaded(_state: Any, worker: Any, _result: Any) -> None:
    """Watch the embedding, where nothing compiles or captures the model it is part of."""
    config = worker.vllm_config.compilation_config
    compiles = getattr(config.mode, "value", config.mode) or getattr(config.cudagraph_mode, "value", 0)
    if not reports(worker):
        return
    if compiles:
        recorder.text(marks.ENGINE, 0, "embedding=fused")
        return
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    for module in worker.model_runner.get_model().modules():
        if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead):
            _handles.append(module.register_forward_pre_hook(guard.contain(_embedding_entered)))
            _handles.append(module.register_forward_hook(guard.contain(_embedding_left)))
            return


def _embedding_entered(_module: Any, _inputs: Any) -> None:
    step.embedding = step.point()


def _embedding_left(_module: Any, _inputs: Any, output: Any) -> None:
    if step.embedding:
        step.span(marks.EMBEDDING, step.embedding, step.point(), output.shape[0])
    step.embedding = None


def release() -> None:
    """Remove what was attached to the model itself, and let go of the events."""
    while _handles:
        _handles.pop().remove()
    step.release()


_V1 = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_V1_OUTPUT = "vllm.v1.worker.gpu_model_runner:AsyncGPUModelRunnerOutput.get_output"
_V2 = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
_V2_OUTPUT = "vllm.v1.worker.gpu.async_utils:AsyncOutput.get_output"
_SAMPLER = "vllm.v1.worker.gpu.sample.sampler:Sampler.__call__"
_REJECTION = "vllm.v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler.__call__"
_POOLED = (
    "vllm.v1.worker.gpu_model_runner:AsyncGPUPoolingModelRunnerOutput.get_output",
    "vllm.v1.worker.gpu.async_utils:AsyncPoolingOutput.get_output",
)

GROUPS = (
    HookGroup("worker", ("embedding", "prefill", "lm_head", "sample"), (
        HookSpec(f"{_WORKER}.execute_model", execute_entered, execute_left, takes=("scheduler_output",)),
        HookSpec(f"{_WORKER}.sample_tokens", sample_call_entered, sample_call_left),
        HookSpec(_LOAD, leave=model_loaded, pausable=False),
    )),
    HookGroup("v1_runner", ("embedding", "prefill", "lm_head", "sample"), (
        HookSpec(f"{_V1}._model_forward", v1_forward_entered, v1_forward_left),
        HookSpec(f"{_V1}.execute_model", leave=v1_execute_left),
        HookSpec(f"{_V1}._sample", sampler_entered, sampler_left),
        HookSpec(_V1_OUTPUT, output_entered, output_left),
    ), optional=True),
    HookGroup("v2_runner", ("embedding", "prefill", "lm_head", "sample"), (
        HookSpec("vllm.v1.worker.gpu.async_utils:StepTimingCollector.forward_start", v2_forward_entered,
                 otherwise=("vllm.v1.worker.gpu.kv_connector:KVConnector.pre_forward",)),
        HookSpec(f"{_V2}.execute_model", leave=v2_execute_left),
        HookSpec(f"{_V2}.sample", v2_head_entered),
        HookSpec(_SAMPLER, v2_sampler_entered, sampler_left),
        HookSpec(_V2_OUTPUT, output_entered, output_left),
    ), optional=True),
    HookGroup("v2_speculative", (), (HookSpec(_REJECTION, v2_sampler_entered, sampler_left),), optional=True),
    *(
        HookGroup(f"pooled_{runner}", (), (HookSpec(target, output_entered, output_left),), optional=True)
        for runner, target in zip(("v1", "v2"), _POOLED, strict=True)
    ),
)  # fmt: skip
