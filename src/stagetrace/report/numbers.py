"""The numbers of a run, on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..numbers import FULL, SATURATED, Aside

#: A gauge's unit on the terminal, and what its value in the document is multiplied by for it.
_UNITS = {"kv_cache_utilization": ("%", 100), "queue_depth": ("requests", 1), "batch_size": ("requests", 1)}


def context_line(context: dict[str, Any], percentile: str = "p50/p95/p99") -> str:
    """The four facts without which a latency is no measurement, and what was measured."""
    caching = {True: "on", False: "off", None: "unknown"}[context["prefix_caching"]]
    return (
        f"{' '.join(filter(None, [context['engine'] or 'engine unknown', context['engine_version']]))}, "
        f"model {context['model'] or 'unknown'}, GPU {context['gpu'] or 'none seen'}, "
        f"{context['requests']} requests: "
        f"request rate {_n(context['request_rate'])}/s, concurrency {_n(context['concurrency'])}, "
        f"percentiles {percentile}, prefix caching {caching}; "
        f"prompt tokens {_q(context['prompt_tokens'])}, output tokens {_q(context['output_tokens'])}, "
        f"{_n(context['output_tokens_per_s'])} output tokens/s"
    )


def numbers_table(document: dict[str, Any]) -> RenderableType:
    """Timers, gauges and stages, with the context above them."""
    table = _columns("", "p50", "p95", "p99", "max", "share (%)")
    for key, values in document["timers"].items():
        table.add_row(f"{key.removesuffix('_ms')} (ms)", *(_n(values[q]) for q in ("p50", "p95", "p99")))
    for key, values in document["gauges"].items():
        if isinstance(values, dict):
            unit, scale = _UNITS[key]
            cells = [values[q] if values[q] is None else values[q] * scale for q in ("p50", "p95", "p99", "max")]
            table.add_row(f"{key} ({unit})", *map(_n, cells))
        else:
            table.add_row(f"{key} (in all)", _n(values, 0))
    table.add_row("")
    table.add_row("stage (ms)")
    for number, (key, values) in enumerate(document["stages"].items(), 1):
        share = "—" if values["share"] is None else f"{values['share']:.1%}"[:-1]
        table.add_row(f"{number:>2} {key}", *(_n(values[f"{q}_ms"], 3) for q in ("p50", "p95", "p99")), "", share)
    return Group(Text("The numbers", style="bold"), Text(context_line(document["context"])), table)


def numbers_view(document: dict[str, Any], beside: Aside, file: str, sessions: list[str]) -> RenderableType:
    """All of it: numbers, stages, and in words what they mean."""
    lines = [Text(line) for line in (*_run(beside, file, sessions), *_saturation(document, beside))]
    room = [Text(line) for line in _room(document["context"], beside)]
    cards = [Text(line) for line in _cards(document.get("gpu"))]
    return Group(numbers_table(document), Text(""), *lines, *room, *cards)


def _run(beside: Aside, file: str, sessions: list[str]) -> Iterator[str]:
    over = "" if beside.window_s is None else f" over {beside.window_s:,.1f} s"
    which = f"; the last of {len(sessions)} runs" if len(sessions) > 1 and beside.session == sessions[-1] else ""
    yield f"{file}, session {beside.session or 'none'}{which}{over}; gauges at {beside.steps:,} engine steps."
    if beside.others:
        yield f"{beside.left_out()}."


def _saturation(document: dict[str, Any], beside: Aside) -> Iterator[str]:
    if not beside.steps:
        yield "Saturation: unknown, no engine step was recorded."
        return
    preempted = document["gauges"]["preemptions"]
    confirmed = f"{preempted} preemptions {'confirm it' if preempted and document['saturated'] else 'in all'}"
    if document["saturated"]:
        queue = (
            f", the queue {_n(beside.queue_from)} → {_n(beside.queue_to)} deep" if beside.queue_to is not None else ""
        )
        yield (
            f"KV cache saturated: it was full while requests waited in {beside.pinned:.0%} of the steps{queue}; "
            f"{confirmed}."
        )
        return
    yield (
        f"KV cache not saturated: it was full (≥ {FULL:.0%}, or no room for one more prompt) while requests waited "
        f"in {beside.pinned:.0%} of the steps ({SATURATED:.0%} would be); {confirmed}."
    )
    if beside.no_slot > SATURATED:
        slots = document["context"]["max_num_seqs"]
        yield (
            f"Batch slots saturated: requests waited for one of all {slots} (max_num_seqs) in {beside.no_slot:.0%} of "
            "the steps."
        )


def _room(context: dict[str, Any], beside: Aside) -> Iterator[str]:
    if context["requests_that_fit"] is None:
        yield "KV room: unknown."
        return
    worst = ""
    if beside.worst_case_fit is not None:
        worst = (
            f"; sized for the worst case ({beside.max_model_len:,} tokens, max_model_len): {beside.worst_case_fit:,}"
        )
    yield (
        f"KV room: {context['kv_blocks']:,} blocks hold {context['requests_that_fit']:,} requests at the lengths "
        f"really seen ({_n(beside.mean_tokens, 0)} tokens on average, nothing shared){worst}."
    )


def _cards(gpu: dict[str, Any] | None) -> Iterator[str]:
    if gpu is None:
        return
    each = gpu["joules_per_output_token"]
    yield (
        f"Energy: {_n(gpu['energy_j'], 0)} J, of which {_n(gpu['requests_j'], 0)} J are the requests' "
        f"({_n(each, 3)} J per output token) and {_n(gpu['idle_j'], 0)} J went by idle; "
        f"{_n(gpu['throttled_requests'], 0)} requests met a throttled card."
    )
    for card in gpu["cards"]:
        busy = [value * 100 if value is not None else None for value in card["utilization"].values()]
        yield (
            f"{card['name'] or 'GPU'} {card['id']}: busy {_n(busy[0], 0)}/{_n(busy[1], 0)}/{_n(busy[2], 0)} %, "
            f"{_q({q: card['power_w'][q] for q in ('p50', 'p95', 'p99')})} W (p50/p95/p99), at most "
            f"{_n(card['temperature_c']['max'], 0)} °C; {card['samples']:,} samples."
        )


def _columns(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(first, justify="left", no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _n(value: float | None, digits: int = 2) -> str:
    return "—" if value is None else f"{value:,.{digits}f}"


def _q(values: dict[str, float | None]) -> str:
    return "/".join("—" if v is None else f"{v:,.0f}" for v in values.values())
