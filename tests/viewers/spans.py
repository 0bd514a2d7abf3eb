"""Spans as a viewer has them and as `stagetrace export` writes them, in one form that can be compared."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STATUS = ("UNSET", "OK", "ERROR")


@dataclass(frozen=True)
class Span:
    """Ids in hex, times in ns since 1970; events are (name, time, attributes), links (trace, span, attributes)."""

    trace_id: str
    span_id: str
    parent_id: str | None
    name: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: list[tuple[str, int, dict[str, Any]]]
    status: str
    links: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)


def differences(found: Span, wanted: Span, within_ns: int, links: bool) -> Iterator[str]:
    """What is not the same, one line each; times may be ``within_ns`` apart.

    Links are compared where the viewer has them; what it adds under names of its own is not.
    """
    pairs: dict[str, tuple[Any, Any]] = {
        "name": (found.name, wanted.name),
        "ids": ((found.trace_id, found.span_id, found.parent_id), (wanted.trace_id, wanted.span_id, wanted.parent_id)),
        "status": (found.status, wanted.status),
        "links": (found.links, wanted.links if links else []),
        "events": ([(e[0], e[2]) for e in found.events], [(e[0], e[2]) for e in wanted.events]),
    }
    for name in wanted.attributes.keys() | {name for name in found.attributes if name.startswith("stagetrace.")}:
        pairs[name] = found.attributes.get(name), wanted.attributes.get(name)
    for name, (is_now, should_be) in pairs.items():
        if is_now != should_be:
            yield f"{wanted.name}: {name} is {is_now!r}, not {should_be!r}"
    for at, wanted_at in zip(_times(found), _times(wanted), strict=False):
        if abs(at - wanted_at) > within_ns:
            yield f"{wanted.name}: {at} ns, not {wanted_at} ns"


def _times(span: Span) -> list[int]:
    return [span.start_ns, span.end_ns, *(event[1] for event in span.events)]


def exported(file: Path) -> Iterator[Span]:
    """What is in a file of OTLP/JSON."""
    for line in file.read_text().splitlines():
        for resource in json.loads(line)["resourceSpans"]:
            for scope in resource["scopeSpans"]:
                for span in scope["spans"]:
                    events = [
                        (event["name"], int(event["timeUnixNano"]), _plain(event.get("attributes", ())))
                        for event in span.get("events", ())
                    ]
                    links = [
                        (link["traceId"], link["spanId"], _plain(link.get("attributes", ())))
                        for link in span.get("links", ())
                    ]
                    yield Span(
                        span["traceId"], span["spanId"], span.get("parentSpanId"), span["name"],
                        int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"]),
                        _plain(span["attributes"]), events, STATUS[span["status"].get("code", 0)], links,
                    )  # fmt: skip


def _plain(attributes: Iterable[dict[str, Any]]) -> dict[str, Any]:
    return {each["key"]: _value(each["value"]) for each in attributes}


def _value(value: dict[str, Any]) -> Any:
    ((kind, content),) = value.items()
    if kind == "arrayValue":
        return [_value(each) for each in content.get("values", ())]
    return int(content) if kind == "intValue" else content
