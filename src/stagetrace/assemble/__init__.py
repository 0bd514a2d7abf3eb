"""Marks → requests: which calls are complete, and what their twelve stages took."""

from .assembler import Assembler

__all__ = ["Assembler"]
