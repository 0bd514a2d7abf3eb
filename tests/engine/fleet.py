"""Several servers at a time, for tests about how requests and servers end: started together, shared by many tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from tests.engine.conftest import Starter
from tests.engine.saboteur.saboteur_control import ENTER, Control
from tests.engine.serving import free_port
from tests.engine.ship import CANARY, KEY, Ship
from tests.receivers import receiver

#: Few, so that requests have to queue; small, so that a prefill takes many steps.
LIMITS = ("--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--enable-scale-out")
#: The hook that raises while ``plain`` is started.
STARTED_WITH = "vllm.v1.engine.async_llm:AsyncLLM.__init__"
#: Several starts at once take a busy machine some time.
START_S = 600.0
#: `make gpupath` has the same tests run on what one GPU runs.
GPU_LIKE = os.environ.get("LAYOUT") == "gpu"


@dataclass
class Rigged(Ship):
    """A server of the fleet, which goes wrong as ``control`` says."""

    control: Control = field(kw_only=True)
    prometheus: int = field(kw_only=True)


@dataclass
class Fleet:
    """``two`` has two API servers; ``idle`` is never asked anything."""

    two: Rigged
    plain: Rigged
    idle: Rigged


@contextmanager
def fleet(starter: Starter) -> Iterator[Fleet]:
    """All of them, started at once: what each of them does at its start leaves the others a CPU now and then."""
    with ExitStack() as stack:

        def launch(name: str, raising: str = "") -> Rigged:
            received, prometheus = stack.enter_context(receiver()), free_port()
            file = starter.folder / f"control-{prometheus}"
            control = Control(file)
            control.order(raising, ENTER)
            extra = (*LIMITS, *(("--api-key", KEY) if name == "two_api_servers" else ()))
            serve = starter.start(
                f"gpu_{name}" if GPU_LIKE else name,
                traced=True,
                extra=extra,
                options=("--prometheus", f"127.0.0.1:{prometheus}"),
                received=received,
                deadline_s=START_S,
                SABOTAGE=str(file),
                SABOTAGE_SAYS=CANARY,
            )
            stack.callback(serve.close)
            return Rigged(next(serve), received, control=control, prometheus=prometheus)

        with ThreadPoolExecutor(3) as pool:
            names = ("two_api_servers", "sabotaged", "sabotaged")
            yield Fleet(*pool.map(launch, names, ("", STARTED_WITH, "")))
