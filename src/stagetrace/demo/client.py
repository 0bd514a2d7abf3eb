"""A plain streaming client for an OpenAI-compatible server: the standard library is enough."""

from __future__ import annotations

import http.client
import json
from typing import Any

TIMEOUT_S = 180.0


class RequestFailed(Exception):
    """One line: what the server answered."""


def chat(port: int, model: str, prompt: str, max_tokens: int) -> str:
    """Send one streamed chat request of exactly ``max_tokens`` tokens, read it to its end, return the response id."""
    body = {
        "model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens,
        "ignore_eos": True, "temperature": 0.0, "stream": True,
    }  # fmt: skip
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RequestFailed(f"the server answered {response.status}: {response.read(200)!r}")
        return _read(response)
    finally:
        connection.close()


def _read(response: http.client.HTTPResponse) -> str:
    identifier = ""
    for line in response:
        if line.startswith(b"data: {"):
            event: dict[str, Any] = json.loads(line[6:])
            if "error" in event:
                raise RequestFailed(f"the server broke off: {event['error']}")
            identifier = event.get("id") or identifier
    if not identifier:
        raise RequestFailed("the server's answer carried no response id")
    return identifier
