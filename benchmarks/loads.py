"""Steps to be timed, with our hooks on the live classes and without them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from stagetrace.hooks import Installer
from stagetrace.runtime import recorder
from stagetrace_vllm.engine_hooks import GROUPS

from .clocks import cpu_ns, settle_heap, shifted
from .engine import Engine, drop, output

#: Untimed steps after the hooks were put on or taken off: the interpreter's caches forget a changed class.
WARM = 3
#: Tokens a request generates before its batch is replaced: its lists and its blocks would grow without end.
LENGTH = 2048
DEPTH = 24


class Hooks:
    """Our engine hooks, on and off."""

    def __init__(self) -> None:
        import vllm.v1.core.sched.scheduler
        import vllm.v1.engine.core  # noqa: F401  (what is imported is hooked at once)

        self._installer = Installer(GROUPS, recorder.paused, lambda _target, _state: None)

    def on(self) -> None:
        """Put them on the live classes; an error if any of them is not there then."""
        self._installer.install()
        missing = {target: state for target, state in self._installer.states.items() if state != "installed"}
        if missing:
            raise RuntimeError(f"hooks are not installed: {missing}")

    def off(self) -> None:
        """Take them off; an error if one of them had failed."""
        failed = [name for name, guard in self._installer.guards.items() if guard.failures]
        self._installer.uninstall()
        if failed:
            raise RuntimeError(f"hooks failed: {failed}")


class Load:
    """One scheduler under a load of ``size`` requests; :meth:`arm` times ``steps`` of its steps."""

    def __init__(self, engine: Engine, scheduler: Any, hooks: Hooks, size: int, steps: int) -> None:
        self.engine, self.scheduler, self.hooks = engine, scheduler, hooks
        self.size, self.steps = size, steps
        self._chance = random.Random(size)
        self._left = 0
        self._depth = (0, 0)

    def arm(self, hooked: bool) -> Callable[[], float]:
        """An arm for :func:`~benchmarks.stats.interleave`: CPU µs per step."""

        def measure() -> float:
            if self._left < WARM + self.steps:
                self._renew()
            self._left -= WARM + self.steps
            (self.hooks.on if hooked else self.hooks.off)()
            timed = self.prepare(WARM + self.steps)
            timed(WARM)
            before = self.scheduler._stagetrace.step
            spent = shifted(self._next_depth(), lambda: _timed(timed, self.steps))
            written = self.scheduler._stagetrace.step - before
            if written != hooked * self.steps:
                raise RuntimeError(f"{written} of {self.steps} steps were recorded with hooks {hooked}")
            return spent / self.steps / 1000

        return measure

    def _next_depth(self) -> int:
        """The same for both arms of a round."""
        depth, uses = self._depth
        if uses == 0:
            depth, uses = self._chance.randrange(DEPTH), 2
        self._depth = (depth, uses - 1)
        return depth

    def _renew(self) -> None:
        self.hooks.on()
        drop(self.scheduler)
        self.fill()
        settle_heap()
        self._left = LENGTH

    def fill(self) -> None:
        """Put ``size`` requests into the scheduler and run their prefill."""
        raise NotImplementedError

    def prepare(self, steps: int) -> Callable[[int], None]:
        """Return a function that runs so many steps, ``steps`` in all, with nothing in it but the engine's work."""
        raise NotImplementedError


class Decode(Load):
    """The same requests in every step, one token each."""

    def fill(self) -> None:
        requests = [self.engine.request(self.engine.prompt_length(), LENGTH * 2) for _ in range(self.size)]
        self._output = output(requests)
        for request in requests:
            self.scheduler.add_request(request)
        self.prepare(0)(WARM)

    def prepare(self, steps: int) -> Callable[[int], None]:
        scheduler, result = self.scheduler, self._output

        def run(count: int) -> None:
            for _ in range(count):
                scheduler.update_from_output(scheduler.schedule(), result)

        return run


class Churn(Load):
    """In every step one request joins (its prefill is in that step) and one leaves."""

    PROMPT = 32

    def fill(self) -> None:
        # The first leaves after one step, the second after two, ...: then every joiner stays ``size`` steps.
        requests = [self.engine.request(self.PROMPT, n + 1) for n in range(self.size - 1)]
        self._all = list(requests)
        for request in requests:
            self.scheduler.add_request(request)
        self.prepare(self.size)(self.size)

    def prepare(self, steps: int) -> Callable[[int], None]:
        joiners = [self.engine.request(self.PROMPT, self.size) for _ in range(steps)]
        self._all = [*self._all[-self.size :], *joiners]
        scheduler, result, coming = self.scheduler, output(self._all), iter(joiners)

        def run(count: int) -> None:
            for _ in range(count):
                scheduler.add_request(next(coming))
                scheduler.update_from_output(scheduler.schedule(), result)

        return run


def _timed(run: Callable[[int], None], count: int) -> int:
    before = cpu_ns()
    run(count)
    return cpu_ns() - before


@contextmanager
def answering(step: Any, outputs: Any) -> Iterator[None]:
    """Let the scheduler's class answer with what it made before, so that the hooks are all that is left to time."""
    from vllm.v1.core.sched.scheduler import Scheduler

    def schedule(self: Any, throttle_prefills: bool = False) -> Any:
        return step

    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        return outputs

    kept = Scheduler.schedule, Scheduler.update_from_output
    Scheduler.schedule, Scheduler.update_from_output = schedule, update_from_output
    try:
        yield
    finally:
        Scheduler.schedule, Scheduler.update_from_output = kept
