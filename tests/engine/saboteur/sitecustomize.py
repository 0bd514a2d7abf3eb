"""Test only: makes a running server go wrong as its test orders (see :mod:`saboteur_control`).

Python runs this at the start of every process that has this folder on its path, before anything else is imported.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

from saboteur_control import ARRIVAL, ENTER, FAIL, LEAVE, MODEL, SLOW, SLOW_S, Control, number

#: Functions of ours that run beside the hook rows.
BESIDE = {
    "stagetrace_vllm.asgi": ("texts", "has_text"),
    "stagetrace_vllm.worker_hooks": ("_embedding_entered", "_embedding_left"),
}
#: Methods of the engine's own, and which orders they heed.
ENGINE = {
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._model_forward": (MODEL, SLOW),
    "vllm.v1.engine.core:EngineCore.preprocess_add_request": (ARRIVAL,),
}


class Sabotage(Exception):
    """Raised where a test wants one of our functions, or the engine, to raise."""


def install(control: Control) -> None:
    """Put ourselves between stagetrace and what it calls, and between the programs here and the clock."""
    import wrapt

    import stagetrace.guard
    import stagetrace.hooks.install as installing
    from stagetrace import runtime

    guards: list[Any] = []
    applications: list[Any] = []
    seen = [control.epoch]

    def heal() -> None:
        """A new order finds every hook in place again, and an application about to be put together."""
        if seen[0] != control.epoch:
            seen[0] = control.epoch
            for guard in guards:
                guard.off, guard.failures = False, 0
            for target in runtime._state.fates:
                runtime._state.fates[target] = "installed"
            for application in applications:
                application.middleware_stack = None

    def raising(name: str, part: int, function: Callable[..., Any] | None) -> Callable[..., Any] | None:
        hook = number(name)

        def call(*args: Any) -> Any:
            heal()
            if control.hits(hook, part):
                raise Sabotage(os.environ.get("SABOTAGE_SAYS", ""))
            return function(*args)  # type: ignore[misc]

        return call if function else None

    build, born = installing.wrapper, stagetrace.guard.Guard.__init__

    def wrapper(spec: Any, *more: Any) -> Any:
        functions = {"enter": ENTER, "leave": LEAVE, "fail": FAIL}
        changed = {name: raising(spec.target, part, getattr(spec, name)) for name, part in functions.items()}
        inner = build(replace(spec, **changed), *more)

        def call(wrapped: Any, instance: Any, *rest: Any) -> Any:
            heal()
            if spec.target.endswith("build_middleware_stack") and instance not in applications:
                applications.append(instance)
            return inner(wrapped, instance, *rest)

        return call

    def remember(guard: Any, *args: Any, **kwargs: Any) -> None:
        born(guard, *args, **kwargs)
        guards.append(guard)

    installing.wrapper = wrapper
    stagetrace.guard.Guard.__init__ = remember  # type: ignore[method-assign]
    for module, names in BESIDE.items():
        wrapt.register_post_import_hook(lambda found, names=names: beside(found, names, raising), module)
    for target, orders in ENGINE.items():
        module, _, path = target.partition(":")
        wrapt.register_post_import_hook(lambda found, at=(path, orders): break_down(found, *at, control), module)
    real, real_ns = time.time, time.time_ns
    time.time = lambda: real() + control.clock_ns / 1e9
    time.time_ns = lambda: real_ns() + control.clock_ns


def beside(module: Any, names: tuple[str, ...], raising: Any) -> None:
    """Let the functions ``names`` of one of our own modules raise on demand."""
    for name in names:
        setattr(module, name, raising(f"{module.__name__}:{name}", ENTER, getattr(module, name)))


def break_down(module: Any, path: str, orders: tuple[int, ...], control: Control) -> None:
    """Let a method of the engine's own raise, or take its time, on demand."""
    owner, _, name = path.partition(".")
    original = getattr(getattr(module, owner), name)

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        order = control.engine
        if order in orders:
            if order != SLOW:
                raise Sabotage(os.environ.get("SABOTAGE_SAYS", ""))
            time.sleep(SLOW_S)
        return original(*args, **kwargs)

    setattr(getattr(module, owner), name, call)


if os.environ.get("SABOTAGE"):
    install(Control(os.environ["SABOTAGE"]))
