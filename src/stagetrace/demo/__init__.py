"""``stagetrace demo``: a real engine, a tiny model, four kinds of request, and their stopwatches."""

from .run import run_demo

__all__ = ["run_demo"]
