"""The ways vLLM is laid out in processes, and what starts each of them on a machine without a GPU."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

VLLM_SERVE = Path(__file__).parent / "vllm_serve.py"
#: Makes a server go wrong as a test orders.
SABOTEUR = str(Path(__file__).parent / "saboteur")
GPU_PATH = Path(__file__).parent / "gpupath"
PLUGIN = str(GPU_PATH / "plugin")
TRITON_CPU = str(GPU_PATH / "triton_cpu")


#: With the worker inside the engine process nobody limits its threads, and on two cores two of them fight.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Configuration:
    """One layout: what to add to the environment and the command, and what vLLM then reports of itself."""

    variables: dict[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    path_entries: tuple[str, ...] = ()
    runner: str = "V1"
    async_scheduling: bool = False
    executor: str = "mp"
    #: A server always puts the engine in a process of its own; these run offline only (`LLM(...)`).
    offline_only: bool = False
    #: More than one is a matter of `vllm serve`, which the CPU build has no command for.
    api_servers: int = 1

    def command(self, command: list[str]) -> list[str]:
        """Return the command line of a server, given that of one API server (`python -m MODULE --model MODEL ...`)."""
        if self.api_servers > 1:
            python, *_, model = command[: command.index("--model") + 2]
            rest = command[command.index("--model") + 2 :]
            command = [python, str(VLLM_SERVE), "serve", model, *rest, "--api-server-count", str(self.api_servers)]
        return [*command, *self.arguments]

    def environment(self) -> dict[str, str]:
        """Return what to add to the environment of a process, the present ``PYTHONPATH`` kept."""
        if not self.path_entries:
            return dict(self.variables)
        entries = [*self.path_entries, *filter(None, [os.environ.get("PYTHONPATH")])]
        return {**self.variables, "PYTHONPATH": os.pathsep.join(entries)}


def _gpu_like(
    flags: str,
    *,
    executor: str,
    offline_only: bool = False,
    api_servers: int = 1,
    path_entries: tuple[str, ...] = (),
    **variables: str,
) -> Configuration:
    return Configuration(
        variables={
            "GPU_DEFAULT_PATH": flags,
            "TRITON_INTERPRET": "1",
            **(ONE_THREAD if executor == "uni" else {}),
            **variables,
        },
        path_entries=(*path_entries, PLUGIN, TRITON_CPU),
        runner="V2",
        async_scheduling=True,
        executor=executor,
        offline_only=offline_only,
        api_servers=api_servers,
    )


CONFIGURATIONS: dict[str, Configuration] = {
    # API server, EngineCore, Worker: what a CPU does by itself.
    "plain": Configuration(),
    "sabotaged": Configuration(path_entries=(SABOTEUR,)),
    # Two API servers, EngineCore, Worker, and the process that has started them.
    "two_api_servers": Configuration(path_entries=(SABOTEUR,), api_servers=2),
    # One process, nothing added.
    "plain_inproc": Configuration(
        variables={"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **ONE_THREAD}, executor="uni", offline_only=True
    ),
    # API server, EngineCore with the worker inside: what one GPU does by itself.
    "v2_async_uni": _gpu_like("async,uni,events", executor="uni"),
    "v2_async_uni_fork": _gpu_like("async,uni,fork,events", executor="uni"),
    "gpu_sabotaged": _gpu_like("async,uni,events", executor="uni", path_entries=(SABOTEUR,)),
    "gpu_two_api_servers": _gpu_like("async,uni,events", executor="uni", path_entries=(SABOTEUR,), api_servers=2),
    # API server, EngineCore, Worker: what several GPUs do.
    "v2_async_mp": _gpu_like("async,events", executor="mp"),
    # One process.
    "v2_async_inproc": _gpu_like(
        "async,uni,events", executor="uni", offline_only=True, VLLM_ENABLE_V1_MULTIPROCESSING="0"
    ),
    # The V1 runner under async scheduling, worker apart and worker inside.
    "v1_async_mp": Configuration(
        variables={"GPU_DEFAULT_PATH": "async,events"}, path_entries=(PLUGIN,), async_scheduling=True
    ),
    "v1_async_uni": Configuration(
        variables={"GPU_DEFAULT_PATH": "async,uni,events", **ONE_THREAD},
        path_entries=(PLUGIN, SABOTEUR),
        async_scheduling=True,
        executor="uni",
    ),
}
