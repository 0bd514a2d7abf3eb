"""What a person can cure: one line on stderr, exit code 2."""

from __future__ import annotations


class Fault(Exception):
    """Unusable input, in one line that names the thing and the cure."""
