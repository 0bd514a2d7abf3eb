"""The driver half of the backend."""

from __future__ import annotations

from typing import Any

from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from . import refuse_the_rest


class CPUDriver(DriverBase):  # type: ignore[misc]
    """Says that it is active and that its device is the CPU."""

    def __init__(self) -> None:
        """Do without the base class's utilities."""

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> Any:
        return GPUTarget("cpu", 0, 1)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")


refuse_the_rest(CPUDriver)
