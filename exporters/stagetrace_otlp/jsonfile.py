"""OTLP/JSON as files have it: an export request a line, hex ids, 64-bit integers as strings, enums as numbers."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator
from typing import Any

from google.protobuf.json_format import MessageToDict
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits

from stagetrace.exporting import RequestRecord, RunRecord, finished

from . import spans
from .sink import resource_of

_IDS = ("traceId", "spanId", "parentSpanId")


def lines(records: Iterable[RequestRecord], run: RunRecord | None) -> Iterator[str]:
    """One line for each call that is over; what still runs has no end, and no span without one is written.

    ValueError with one line, before the first, for limits in the environment that are no numbers.
    """
    resource, limits = resource_of(run, Resource.create({})), SpanLimits()
    made = (spans.trace(call, resource, run.engine if run else None, limits) for call in finished(records))
    return (_line(MessageToDict(encode_spans(trace), use_integers_for_enums=True)) for trace in made)


def _line(message: dict[str, Any]) -> str:
    return json.dumps(_hex(message), separators=(",", ":"))


def _hex(value: Any) -> Any:
    """Protocol buffers' JSON has bytes in base64; OTLP's has ids in hex."""
    if isinstance(value, list):
        return [_hex(each) for each in value]
    if isinstance(value, dict):
        return {
            key: base64.b64decode(each).hex() if key in _IDS and isinstance(each, str) else _hex(each)
            for key, each in value.items()
        }
    return value
