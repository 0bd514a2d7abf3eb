"""Sizes as people write them."""

from __future__ import annotations

import re

# A bare letter is binary, as in dd, ls and docker.
_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}
_SIZE = re.compile(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([a-z]*)\s*", re.ASCII | re.IGNORECASE)


def parse_size(text: str) -> int:
    """Return the bytes that ``1GiB``, ``500MB`` or ``1048576`` stand for; ValueError with one clear line."""
    match = _SIZE.fullmatch(text)
    factor = _UNITS.get(match[2].lower()) if match else None
    size = int(float(match[1]) * factor) if match and factor else 0
    if size < 1:
        raise ValueError(f"not a size: {text!r} (write 1GiB, 500MB or a number of bytes)")
    return size


def format_size(size: int) -> str:
    """Return ``size`` bytes for a person, such as ``1.0 GiB``."""
    value = float(size)
    for unit in ("bytes", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
