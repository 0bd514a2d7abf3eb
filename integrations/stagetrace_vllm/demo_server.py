"""How `stagetrace demo` starts a real vLLM server on the tiny model, on a GPU or without one."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from . import demo_model
from .environment import INSTALL

MODEL_NAME = "stagetrace-demo"
MAX_MODEL_LEN = 2560
#: Small, so that a burst of the demo's size has to queue.
MAX_NUM_SEQS = 8


class DemoServer:
    """The server the demo runs: its command line, its environment, its model and its prompts."""

    name = "vllm"
    model = MODEL_NAME
    max_num_seqs = MAX_NUM_SEQS
    max_model_len = MAX_MODEL_LEN

    def missing(self) -> str | None:
        """Return None when the demo can run, else one line saying what to install. Imports nothing."""
        absent = [name for name in ("vllm", "tokenizers", "safetensors", "numpy") if find_spec(name) is None]
        if not absent:
            return None
        return f"the demo needs vLLM, which is not installed here (no module {absent[0]}): {INSTALL}"

    def command(self, model_dir: Path, port: int) -> list[str]:
        """Return the server's command line. (`vllm serve` is the same, but wants a package called `vllm`.)"""
        return [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(model_dir),
            "--served-model-name", MODEL_NAME,
            "--host", "127.0.0.1",
            "--port", str(port),
            "--dtype", "float32",
            "--enforce-eager",
            "--max-model-len", str(MAX_MODEL_LEN),
            "--max-num-seqs", str(MAX_NUM_SEQS),
        ]  # fmt: skip

    def environment(self) -> dict[str, str]:
        """Return what to add to the server's environment."""
        return {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "HF_HUB_OFFLINE": "1",
        }

    def make_model(self, path: Path) -> Path:
        """Make the tiny model at ``path``, or reuse it."""
        return demo_model.make_model(path)

    def prompt_of(self, model_dir: Path, tokens: int, seed: int) -> str:
        """Return a user message whose chat prompt has ``tokens`` tokens."""
        return demo_model.prompt_of(model_dir, tokens, seed)
