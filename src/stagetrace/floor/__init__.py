"""What the stages could cost at least: a model's shape, a device's published rates, and the larger of two times.

Pure arithmetic on a ``config.json``; nothing of an engine is needed. docs/floor.md says how each figure is made.
"""

from .config import ConfigError, read_config
from .devices import DEVICES, Device, find_device
from .families import model_of
from .model import Model
from .rows import Floor, Request, Row, floor_of
from .work import Rates, Work, decode_pass, embedding, lm_head, prefill, sample

__all__ = [
    "DEVICES",
    "ConfigError",
    "Device",
    "Floor",
    "Model",
    "Rates",
    "Request",
    "Row",
    "Work",
    "decode_pass",
    "embedding",
    "find_device",
    "floor_of",
    "lm_head",
    "model_of",
    "prefill",
    "read_config",
    "sample",
]
