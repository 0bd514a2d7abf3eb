"""Worker process: which GPU it computes on, said once, as soon as it has one.

The collector finds the card by this name, in a process of its own. Nothing here asks the driver's management library.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from stagetrace.plugin import HookGroup, HookSpec, marks, recorder

_INIT = "vllm.v1.worker.gpu_worker:Worker.init_device"


def device_ready(_state: Any, worker: Any, _result: Any) -> None:
    """Say which card this worker has, of which rank of which engine it is, and what kind of card that is."""
    device = worker.device
    torch = sys.modules.get("torch")
    if torch is None or getattr(device, "type", "cpu") != "cuda":
        return
    found = torch.cuda.get_device_properties(device)
    parallel = worker.parallel_config
    engine = getattr(parallel, "data_parallel_index", None) or getattr(parallel, "data_parallel_rank", 0) or 0
    text = f"{engine} {worker.rank} {identifier(found, device.index or 0)} {found.name}"
    recorder.text(marks.GPU, 0, text)
    recorder.text(marks.ENGINE, 0, f"gpu={found.name}")


def identifier(found: Any, index: int) -> str:
    """What the driver calls a card: ``GPU-``, ``MIG-`` or ``PCI-`` and what follows; ``-`` where that is not known.

    Not its number: CUDA counts the fastest card first, and only those that it may see. Of a slice, CUDA may know no
    more than the card it is of; then the slice's own name is what the process was given.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    given = visible[index].strip() if index < len(visible) else ""
    if given.startswith("MIG-"):
        return given
    uuid = str(getattr(found, "uuid", "") or "")
    if uuid:
        return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    bus = getattr(found, "pci_bus_id", None)
    if bus is not None:
        return f"PCI-{getattr(found, 'pci_domain_id', 0):08x}:{bus:02x}:{getattr(found, 'pci_device_id', 0):02x}.0"
    return given if given.startswith("GPU-") else "-"


GROUPS = (HookGroup("device", (), (HookSpec(_INIT, leave=device_ready, pausable=False),), optional=True),)
