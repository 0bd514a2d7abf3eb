"""The body of a request: greedy, of exactly so many tokens where the server knows ``ignore_eos``."""

from __future__ import annotations

import json
from typing import Any

from .settings import Settings


def payload(settings: Settings, model: str, prompt: str, max_tokens: int) -> bytes:
    """The JSON to send."""
    body: dict[str, Any] = {
        "model": model, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0.0, "stream": settings.stream,
    }  # fmt: skip
    if settings.stream:
        body["stream_options"] = {"include_usage": True}
    if settings.completions:
        body["prompt"] = prompt
    else:
        body["messages"] = [{"role": "user", "content": prompt}]
    return json.dumps(body).encode()
