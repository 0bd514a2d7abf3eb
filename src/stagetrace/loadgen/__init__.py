"""``stagetrace load``: reproducible load on an OpenAI-compatible server, and the client's own clock on it."""

from .run import run_load
from .settings import Settings

__all__ = ["Settings", "run_load"]
