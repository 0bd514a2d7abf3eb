"""A model's ``config.json``: found, read, and its fields taken out with errors that name them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: No config is as large as this; a file of weights is.
MAX_BYTES = 16 << 20
#: No dimension of a model is.
MAX_COUNT = 10**9
#: Where configs of several parts keep the one of the language model.
_NESTED = ("text_config", "llm_config", "language_config")
#: What such a config may say outside of it.
_OUTER = ("dtype", "torch_dtype", "quantization_config", "tie_word_embeddings", "vocab_size")


class ConfigError(ValueError):
    """A config that is not understood: one line, which names the field."""


def read_config(path: Path) -> dict[str, Any]:
    """The ``config.json`` at ``path``, which is the file or the directory with it. ConfigError names the fault."""
    if path.is_dir():
        path = path / "config.json"
    try:
        if not path.exists():
            raise ConfigError(
                f"{path}: no such file; give the path of a model's config.json or of its directory "
                "(a model's name on a hub does not do: nothing is downloaded)"
            )
        if not path.is_file() or path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{path}: not a config.json; give that file of the model, or its directory")
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: not JSON; give a model's config.json") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: not a JSON object; give a model's config.json")
    return found


def language_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part that generates text, of a config that has others beside it, with what is said outside of it."""
    for name in _NESTED:
        inner = config.get(name)
        if isinstance(inner, dict):
            return {key: config[key] for key in _OUTER if config.get(key) is not None} | inner
    return dict(config)


class Fields:
    """Typed access to a config. ``name`` is what errors call a field's place, with a dot at its end if not empty."""

    def __init__(self, values: Mapping[str, Any], name: str = "") -> None:
        self.values = values
        self.name = name

    def count(self, *keys: str, default: int | None = None, least: int = 1) -> int:
        """The first of ``keys`` that is there, as a whole number; ``default`` if none is, or ConfigError."""
        for key in keys:
            value = self.values.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_COUNT:
                raise ConfigError(f"{self.name}{key} is {_shown(value)}, not a whole number from {least} up")
            return value
        if default is None:
            raise ConfigError(f"{self.name}{keys[0]} is missing")
        return default

    def optional(self, key: str) -> int | None:
        """``key`` as a whole number, None where it is absent, null or 0."""
        return self.count(key, default=0, least=0) or None

    def flag(self, key: str, default: bool = False) -> bool:
        """``key`` as a truth value."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise ConfigError(f"{self.name}{key} is {_shown(value)}, not true or false")
        return default if value is None else value

    def text(self, *keys: str) -> str | None:
        """The first of ``keys`` that is there, which must be a string."""
        for key in keys:
            value = self.values.get(key)
            if value is not None and not isinstance(value, str):
                raise ConfigError(f"{self.name}{key} is {_shown(value)}, not a string")
            if value:
                return value
        return None

    def items(self, key: str) -> list[Any]:
        """``key`` as a list, empty where it is absent."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, list):
            raise ConfigError(f"{self.name}{key} is {_shown(value)}, not a list")
        return value or []

    def inner(self, key: str) -> Fields | None:
        """The object at ``key``, None where it is absent."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"{self.name}{key} is {_shown(value)}, not an object")
        return Fields(value, f"{self.name}{key}.") if value else None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:39] + "…"
