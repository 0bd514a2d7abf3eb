"""A running engine's yardstick: the model it says it has, and the device it says it has, or was given for it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .config import ConfigError
from .devices import find_device
from .families import model_of
from .model import Model
from .work import Rates

#: Names a device in place of the one that a worker reports; on a CPU there is none but this.
ENV = "STAGETRACE_GPU"
CURE = f"{ENV}=NAME names a device that `stagetrace floor` knows"
#: Of an engine's settings, those that are the model's config: JSON in pieces, numbered from 0.
_PIECE = re.compile(r"model_config\.(\d{1,3})")


@dataclass(frozen=True)
class Yardstick:
    """What an engine's stages are held against; ``gpu`` is the device's short name."""

    model: Model
    rates: Rates
    gpu: str


def yardstick(settings: Mapping[str, str], named: str | None = None) -> Yardstick | str:
    """The yardstick of the engine with these ``settings``, or in a line why it has none.

    ``named`` is the device to compare with in place of what a worker reported.
    """
    if settings.get("pipeline_parallel", "1") != "1":
        return "with pipeline parallelism, the worker that reports its times has a part of the model only"
    if settings.get("expert_parallel") == "1" and settings.get("data_parallel", "1") != "1":
        return "with experts spread over several engines, no one's times are the whole model's"
    config = model_config(settings)
    if config is None:
        return "the engine has not said how its model is built"
    seen = named or settings.get("gpu")
    if not seen:
        return f"no GPU was seen; {CURE}"
    device = find_device(seen)
    if device is None:
        where = f"{ENV}={seen}" if named else seen
        return f"no rates are known of {where}; {CURE}"
    try:
        model = model_of(config)
    except ConfigError as error:
        return f"the model's config: {error}"
    return Yardstick(model, Rates.of(device, model, _gpus(settings)), device.name)


def model_config(settings: Mapping[str, str]) -> dict[str, Any] | None:
    """The model's config, put together from its pieces; None while they are not all there."""
    pieces = {int(found[1]): text for key, text in settings.items() if (found := _PIECE.fullmatch(key))}
    try:
        config = json.loads("".join(pieces[index] for index in range(len(pieces))))
    except (KeyError, ValueError, RecursionError):
        return None
    return config if isinstance(config, dict) else None


def is_piece(setting: str) -> bool:
    """Whether a setting is a piece of the model's config."""
    return _PIECE.fullmatch(setting) is not None


def _gpus(settings: Mapping[str, str]) -> int:
    value = settings.get("tensor_parallel", "1")
    return max(int(value), 1) if value.isdecimal() else 1
