"""The twelve stages of a request: the one table that hooks, assembly, reports, gate and docs read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """One row of the stage table.

    ``key`` is also the span name. ``starts`` and ``ends`` say which two marks bound the stage; a stage is
    never stretched to its neighbour's. ``facts`` names the attributes every measured interval carries.
    """

    number: int
    key: str
    title: str
    process: str
    starts: str
    ends: str
    facts: tuple[str, ...]
    worse_with: str


#: What every stage that runs on the device says of the hardware's floor; None where that is not known.
FLOOR = ("floor_ms", "over_floor", "achieved_tflop_per_s", "achieved_gb_per_s")

STAGES: tuple[Stage, ...] = (
    Stage(
        1,
        "http_receive",
        "bytes read, JSON parsed, body validated",
        "API",
        "the ASGI call",
        "entry of the request handler",
        ("bytes", "route", "stream", "n", "max_tokens"),
        "huge payloads",
    ),
    Stage(
        2,
        "chat_template",
        "messages rendered to one string",
        "API",
        "render entry",
        "tokenize entry",
        ("messages", "characters"),
        "hand-built templates",
    ),
    Stage(
        3,
        "tokenize",
        "text to ids",
        "API",
        "tokenize entry",
        "tokenize exit",
        ("prompt_tokens", "pool_wait_ms"),
        "high request rate, long prompts",
    ),
    Stage(
        4,
        "admission",
        "waiting for a batch slot and free blocks",
        "API → engine core",
        "hand-over to the engine",
        "prefix look-up in the schedule() that admits it",
        ("hand_off_ms", "wait_ms", "reason", "queue_depth", "requeues"),
        "no free blocks or slots",
    ),
    Stage(
        5,
        "kv_allocate",
        "prefix cache looked up, blocks assigned",
        "engine core",
        "that look-up",
        "blocks assigned",
        ("blocks", "block_size", "cached_tokens", "bytes"),
        "very long prompts",
    ),
    Stage(
        6,
        "embedding",
        "rows gathered",
        "worker",
        "embedding layer entry, inside the forward",
        "its exit",
        ("rows", *FLOOR),
        "fused in a compiled graph",
    ),
    Stage(
        7,
        "prefill",
        "all prompt positions through the layers",
        "worker",
        "the forward(s) of its prompt tokens",
        "their end, less 6",
        ("tokens", "chunks", "batch", "gaps_ms", "cost_share_ms", "cache_bytes_written", "flop", *FLOOR),
        "long prompts, no reuse",
    ),
    Stage(
        8,
        "lm_head",
        "final norm and head, last position",
        "worker",
        "end of the first-token forward",
        "logits ready",
        ("vocabulary", "norm", *FLOOR),
        "very large vocabularies",
    ),
    Stage(
        9,
        "sample",
        "one id drawn",
        "worker",
        "sampler entry in the first-token step",
        "sampler exit",
        ("temperature", "top_p", "top_k", "grammar", *FLOOR),
        "grammar constraints",
    ),
    Stage(
        10,
        "detokenize",
        "bytes buffered, first text handed to the client: TTFT ends",
        "engine core → API",
        "entry of the engine's output update",
        "first content send done",
        ("hand_back_ms", "detokenize_ms", "emit_ms"),
        "concurrency",
    ),
    Stage(
        11,
        "decode",
        "one pass per further token",
        "all",
        "end of 10",
        "the engine frees the request",
        (
            "tokens",
            "steps",
            "itl_ms",
            "batch",
            "split_ms",
            "split_source",
            "stalled_by",
            "worst_steps",
            "emit_lag_ms",
            "overlapped_ms",
            "bytes_read",
            "floor_steps",
            *FLOOR,
        ),
        "output length, batch, position",
    ),
    Stage(
        12,
        "teardown",
        "blocks returned, last byte sent",
        "engine core, API",
        "end of 11",
        "last send (offline: output returned)",
        ("finish_reason", "blocks_freed", "blocks_kept"),
        "blocks kept for reuse",
    ),
)

BY_KEY: dict[str, Stage] = {stage.key: stage for stage in STAGES}

#: What an interval may say of itself. Only ``measured`` and ``estimated`` carry times.
STATES = ("measured", "estimated", "fused", "not_applicable", "not_observable", "not_reached")


def markdown() -> str:
    """Return the table as GitHub Markdown; the README embeds exactly this text (a test compares them)."""
    lines = [
        "| # | key = span name | stage | process | from → to | facts it carries |",
        "|---|---|---|---|---|---|",
    ]
    for s in STAGES:
        facts = ", ".join(f"`{fact}`" for fact in s.facts if fact not in FLOOR)
        facts += ", its [floor](docs/floor.md)" if s.facts[-len(FLOOR) :] == FLOOR else ""
        lines.append(f"| {s.number} | `{s.key}` | {s.title} | {s.process} | {s.starts} → {s.ends} | {facts} |")
    return "\n".join(lines)
