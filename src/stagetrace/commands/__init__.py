"""Commands of the terminal, a module each: options in, exit code out. They load what they need when they are run."""

from .doctor import doctor
from .load import load
from .numbers import numbers

__all__ = ["doctor", "load", "numbers"]
