"""What ``instrument`` was asked for, as far as a look tells whether it can be: its collector comes later, or never.

An engine's process loads this: nothing of the store or the exporters, which have the last word.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from typing import Any

from . import address

#: A store has room for itself only above this.
MIN_STORE_BYTES = 1 << 20
_HOST_PORT = re.compile(r"(?:\[[0-9A-Fa-f:.%]+\]:|[^\s:\[\]]*:)?([0-9]{1,5})")
_SQLITE = b"SQLite format 3\0"


def checked(options: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """``options`` as a collector can be started with them, and a line for each that cannot be carried out."""
    given = {name: value for name, value in options.items() if value is not None}
    faults = []
    for name, look in (("store", _store), ("otlp", _otlp), ("prometheus", _prometheus)):
        if name in given and (fault := look(given[name])):
            cost = "nothing will be stored" if name == "store" else "nothing will be exported"
            faults.append(f"{name}={_show(given[name])}: {fault}; {cost}")
    size, share = given.get("store_max"), given.get("sample")
    if size is not None and not (_number(size, int) and size >= MIN_STORE_BYTES):
        faults.append(f"store_max={_show(size)}: give bytes, at least {MIN_STORE_BYTES}; 1 GiB holds")
        options = {**options, "store_max": None}
    if share is not None and not (_number(share, (int, float)) and 0 <= share <= 1):
        faults.append(f"sample={_show(share)}: give a number from 0 to 1; nothing will be exported")
        options = {**options, "sample": math.nan}  # which exporters refuse
    return options, faults


def _number(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _show(value: Any) -> str:
    return repr(address.shown(value) if isinstance(value, str) else value)[:200]


def _store(value: Any) -> str | None:
    return next(_store_faults(value), None)


def _store_faults(value: Any) -> Iterator[str]:
    try:
        path = os.path.realpath(value)
    except (TypeError, ValueError):
        yield "not a file's name"
        return
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):
        yield "no such directory; make it first"
    elif not os.access(folder, os.W_OK | os.X_OK):
        yield "its directory may not be written; name a file elsewhere"
    elif os.path.exists(path):
        try:
            if not os.path.isfile(path):
                yield "not a regular file; name a file"
            elif _start(path) != _SQLITE:
                yield "not a stagetrace store; name another file"
        except OSError as error:
            yield f"{error.strerror}; see to it or name another file"


def _start(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(len(_SQLITE))


def _otlp(value: Any) -> str | None:
    fine = isinstance(value, str) and address.parse(value)
    return None if fine else "not a URL such as http://localhost:4318 or http://localhost:4317 (gRPC)"


def _prometheus(value: Any) -> str | None:
    found = _HOST_PORT.fullmatch(value) if isinstance(value, str) else None
    return None if found and int(found[1]) < 1 << 16 else "not an address such as 127.0.0.1:9464"
