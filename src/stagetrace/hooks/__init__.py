"""Hooks as data: rows that are resolved, installed and removed, never code that patches by hand."""

from .install import Installer
from .spec import HookGroup, HookSpec

__all__ = ["HookGroup", "HookSpec", "Installer"]
