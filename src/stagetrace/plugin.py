"""The plug-in API: everything an integration may import from stagetrace."""

from __future__ import annotations

from . import instrument, marks, parents, uninstrument
from .clock import now
from .context import Root, current, number
from .device_events import DeviceEvents, Lease, Placed, Point, Span
from .guard import Guard
from .hooks import HookGroup, HookSpec
from .marks import key_of, signed
from .propagation import chosen
from .provider import Entered, begin, enter, leave
from .runtime import Integration, activate, engine_starts, exported_share, recorder, report, troubled

__all__ = [
    "OPTIONS",
    "DeviceEvents",
    "Entered",
    "Guard",
    "HookGroup",
    "HookSpec",
    "Integration",
    "Lease",
    "Placed",
    "Point",
    "Root",
    "Span",
    "activate",
    "begin",
    "chosen",
    "current",
    "engine_starts",
    "enter",
    "exported_share",
    "instrument",
    "key_of",
    "leave",
    "marks",
    "now",
    "number",
    "parents",
    "recorder",
    "report",
    "signed",
    "troubled",
    "uninstrument",
]

#: What ``instrument`` takes.
OPTIONS = ("store", "store_max", "otlp", "prometheus", "sample", "tracer_provider")
