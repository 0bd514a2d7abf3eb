"""Whom a call inside the engine concerns, so that a delay can be meant for some requests and some steps only."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True)
class Call:
    """A call of a patched method."""

    place: str
    owner: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def argument(self, position: int, name: str) -> Any:
        """An argument, however it was passed."""
        return self.args[position] if len(self.args) > position else self.kwargs[name]


@dataclass(frozen=True)
class Hit:
    """The requests that a call works for, each with the tokens it has generated so far, and its batch's size."""

    requests: dict[str, int]
    batch: int = 1


#: A request decodes, as far as delays are concerned, when it has so many tokens. Under asynchronous scheduling the
#: engine works on the second token before it has handed the first one back, so that step is not part of decoding.
DECODING = 2
#: Decides whether a call is one to be delayed.
Who = Callable[[Call], "Hit | None"]


@dataclass
class Step:
    """One iteration of the engine, as the scheduler's output describes it."""

    batch: int
    #: Requests whose prompt it works on, and those it gives a further token, with the tokens they have.
    first: dict[str, int]
    further: dict[str, int]
    delayed: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, output: Any) -> Step:
        """From a ``SchedulerOutput``."""
        cached = output.scheduled_cached_reqs
        generated = dict(zip(cached.req_ids, cached.num_output_tokens, strict=True))
        counts = {name: generated.get(name, 0) for name in output.num_scheduled_tokens}
        first = {name: n for name, n in counts.items() if not n}
        return cls(len(counts), first, {name: n for name, n in counts.items() if n >= DECODING})

    def hit(self, further: bool) -> Hit | None:
        """Those of its requests that get their first token, or a further one."""
        requests = self.further if further else self.first
        return Hit(requests, self.batch) if requests else None


class Now:
    """What this process is working on."""

    #: API server: the id of the request whose body was read last, and of the one the running task works for.
    read_last = ""
    request: ContextVar[str] = ContextVar("stagetrace_faults_request")
    #: Worker: its step.
    step: Step | None = None
    #: (place, request) of delays that are due once in a request's life.
    once: ClassVar[set[tuple[str, str]]] = set()


def body_read(call: Call) -> None:
    """``starlette.requests.Request.json``: from here on we know whom the API server works for."""
    Now.read_last = call.owner.headers.get("x-request-id", "")
    Now.request.set(Now.read_last)


def step_begins(call: Call) -> None:
    """``WorkerWrapperBase.execute_model``."""
    Now.step = Step.of(call.argument(0, "scheduler_output"))


def of_api(_call: Call) -> Hit:
    """In the API server. Threads of a pool inherit no context: there it is the request that was read last."""
    return Hit({Now.request.get(Now.read_last): 0})


def of_request(call: Call) -> Hit:
    """The first argument is the engine's request."""
    return Hit({call.argument(0, "request").request_id: 0})


def of_request_once(call: Call) -> Hit | None:
    """The first argument is the engine's request or its id, and only the first such call for it is meant."""
    request = call.args[0] if call.args else call.kwargs.get("request") or call.kwargs["request_id"]
    name = getattr(request, "request_id", request)
    if (call.place, name) in Now.once:
        return None
    Now.once.add((call.place, name))
    return Hit({name: 0})


def of_first_text(call: Call) -> Hit | None:
    """``BaseIncrementalDetokenizer.update``: a request's first token becomes text."""
    return of_api(call) if call.owner.num_output_tokens() == 0 else None


def of_first_booking(call: Call) -> Hit | None:
    """``Scheduler._update_request_with_output``: a request's first token is booked."""
    request = call.argument(0, "request")
    return None if request.num_output_tokens else Hit({request.request_id: 0})


def of_further_booking(call: Call) -> Hit | None:
    """The same for a further token."""
    request = call.argument(0, "request")
    generated = request.num_output_tokens
    return Hit({request.request_id: generated}, len(call.owner.running)) if generated >= DECODING else None


def composed(further: bool) -> Who:
    """The first argument is the composition of a step."""
    return lambda call: Step.of(call.argument(0, "scheduler_output")).hit(further)


def in_step(further: bool) -> Who:
    """Somewhere inside the worker's step; the first such call of the step is meant."""

    def who(call: Call) -> Hit | None:
        step = Now.step
        hit = step.hit(further) if step is not None and call.place not in step.delayed else None
        if step is not None and hit is not None:
            step.delayed.add(call.place)
        return hit

    return who


def returned(further: bool) -> Who:
    """``WorkerProc.enqueue_output``: of the two answers of a step, the one with the sampled tokens."""
    inside = in_step(further)
    return lambda call: inside(call) if hasattr(call.argument(0, "output"), "sampled_token_ids") else None


def of_first_send(call: Call) -> Hit | None:
    """``RequestResponseCycle.send``: the first chunk with text in it."""
    body = call.argument(0, "message").get("body") or b""
    if not re.search(rb'"content":"[^"]', body) or getattr(call.owner, "_faults_text_sent", False):
        return None
    call.owner._faults_text_sent = True
    return of_api(call)


def of_last_send(call: Call) -> Hit | None:
    """The same: what ends the response."""
    message = call.argument(0, "message")
    ends = message["type"] == "http.response.body" and not message.get("more_body", False)
    return of_api(call) if ends else None
