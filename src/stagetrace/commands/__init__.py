"""Commands of the terminal, a module each: options in, exit code out. They load what they need when they are run."""

from .doctor import doctor
from .floor import floor
from .load import load
from .numbers import numbers

__all__ = ["doctor", "floor", "load", "numbers"]
