"""The embedded store: one SQLite file that one process writes and any number may read meanwhile."""

from .files import StoreError, refuse_unless_writable
from .reader import Trace, find, load
from .sizes import format_size, parse_size
from .writer import Pruned, StoreWriter

__all__ = [
    "Pruned",
    "StoreError",
    "StoreWriter",
    "Trace",
    "find",
    "format_size",
    "load",
    "parse_size",
    "refuse_unless_writable",
]
