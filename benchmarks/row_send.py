"""The per-token path of the API process: our ``send`` around the server's, for one streamed chunk."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from stagetrace.context import new_root
from stagetrace_vllm.asgi import Watch

from .clocks import per_call, settle_heap
from .figures import Options, Outcome, Progress
from .recording import private_session
from .stats import Spread, differences, interleave, median

ROUNDS = 150
CHUNKS = 3000


def run(_options: Options, progress: Progress) -> Outcome:
    """Send the same chunk through our layer and without it."""
    progress.of(ROUNDS)
    body = chunk()
    message = {"type": "http.response.body", "body": body, "more_body": True}
    with private_session():
        root = new_root()
        root.streams = root.text_sent = True
        watched = Watch(root, receive, send).send
        arms = (per_call(sender(watched, message), CHUNKS), per_call(sender(send, message), CHUNKS))
        interleave(arms, 3, lambda: None)
        settle_heap()
        ours, bare = interleave(arms, ROUNDS, progress.tick)
    outcome = Outcome()
    added = [value / 1000 for value in differences(ours, bare)]
    outcome.add(
        "added to each streamed chunk", "µs", Spread.of(added), None,
        f"{median(bare):,.0f} ns → {median(ours):,.0f} ns around a send that does nothing; {len(body)} bytes",
    )  # fmt: skip
    return outcome


def chunk() -> bytes:
    """One server-sent event as the engine writes it for one token."""
    choice = {"index": 0, "delta": {"content": " measured"}, "logprobs": None, "finish_reason": None, "token_ids": None}
    event = {
        "id": f"chatcmpl-{0x5eed:032x}", "object": "chat.completion.chunk", "created": 1_700_000_000,
        "model": "stagetrace-demo", "choices": [choice],
    }  # fmt: skip
    return f"data: {json.dumps(event, separators=(',', ':'))}\n\n".encode()


def sender(target: Callable[[Any], Any], message: dict[str, Any]) -> Callable[[int], None]:
    """A loop that awaits ``target(message)``, which never has to wait, without an event loop's own cost."""

    async def repeat(count: int) -> None:
        for _ in range(count):
            await target(message)

    def loop(count: int) -> None:
        try:
            repeat(count).send(None)
        except StopIteration:
            return
        raise AssertionError("a send that does nothing has suspended")

    return loop


async def send(_message: Any) -> None:
    """Hand over nothing."""


async def receive() -> Any:
    """Nothing arrives."""
    return {"type": "http.request"}
