"""Test only: makes a real server slow at one chosen place, for chosen requests. See ../../README.md."""

from __future__ import annotations

import os

from .control import ENV

_installed = False


def install() -> None:
    """Entry point ``vllm.general_plugins``. Without the variable that names the control file it does nothing."""
    global _installed
    if _installed or not os.environ.get(ENV):
        return
    _installed = True
    from . import patches

    patches.install(os.environ[ENV])
