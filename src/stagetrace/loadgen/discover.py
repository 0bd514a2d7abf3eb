"""What a server says of itself before any load: its models, and whether it caches prefixes."""

from __future__ import annotations

import http.client
import json
import re
from dataclasses import dataclass
from typing import Any

from ..faults import Fault
from .settings import API_KEY, Settings, Target

TIMEOUT_S = 10.0
_CACHING = re.compile(r'enable_prefix_caching="(\w+)"')


@dataclass(frozen=True)
class Served:
    """The model to ask for; unknown is None."""

    model: str
    max_model_len: int | None
    prefix_caching: bool | None


def discover(target: Target, settings: Settings, headers: dict[str, str]) -> Served:
    """Look the model up; Fault if nobody answers, or the model is not there."""
    status, body = _get(target, "/v1/models", settings.place, headers)
    if settings.model is None and status in (401, 403):
        raise Fault(f"{settings.place}: HTTP {status}: it wants another key, or one at all: set {API_KEY}")
    models = _models(body) if status == 200 else []
    names = [str(model["id"]) for model in models]
    if settings.model is None and not names:
        raise Fault(
            f"{settings.place}: /v1/models lists no model (HTTP {status}); if it serves one all the same, "
            "`stagetrace load --model` can name it"
        )
    if settings.model is not None and names and settings.model not in names:
        raise Fault(f"{settings.place}: unknown model {settings.model}; the server has: {', '.join(names)}")
    chosen = settings.model or names[0]
    limit = next((m.get("max_model_len") for m in models if m["id"] == chosen), None)
    return Served(chosen, limit if isinstance(limit, int) else None, _caching(target, settings.place, headers))


def _models(body: bytes) -> list[dict[str, Any]]:
    try:
        listed = json.loads(body)["data"]
    except (ValueError, KeyError, TypeError):
        return []
    return [model for model in listed if isinstance(model, dict) and "id" in model] if isinstance(listed, list) else []


def _caching(target: Target, url: str, headers: dict[str, str]) -> bool | None:
    """From the server's metrics, where it has them and says so there."""
    try:
        status, body = _get(target, "/metrics", url, headers)
    except Fault:
        return None
    found = _CACHING.search(body.decode("utf-8", "replace")) if status == 200 else None
    return found[1].lower() in ("true", "1") if found else None


def _get(target: Target, path: str, url: str, headers: dict[str, str]) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(target.host, target.port, timeout=TIMEOUT_S)
    if target.tls:
        connection = http.client.HTTPSConnection(target.host, target.port, timeout=TIMEOUT_S, context=target.tls)
    try:
        connection.request("GET", target.base + path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException) as error:
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise Fault(f"--url {url}: no server answers there ({why})") from None
    finally:
        connection.close()
