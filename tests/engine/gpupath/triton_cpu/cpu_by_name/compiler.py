"""The compiler half of the backend."""

from __future__ import annotations

from typing import Any

from triton.backends.compiler import BaseBackend

from . import refuse_the_rest


class CPUCompiler(BaseBackend):  # type: ignore[misc]
    """Claims the target `cpu`, compiles nothing."""

    @staticmethod
    def supports_target(target: Any) -> bool:
        return bool(target.backend == "cpu")


refuse_the_rest(CPUCompiler)
