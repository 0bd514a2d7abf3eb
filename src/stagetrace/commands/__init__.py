"""Commands of the terminal, a module each: options in, exit code out. They load what they need when they are run."""

from .baseline import baseline
from .doctor import doctor
from .floor import floor
from .gate import GateCommand, gate
from .load import load
from .numbers import numbers

__all__ = ["GateCommand", "baseline", "doctor", "floor", "gate", "load", "numbers"]
