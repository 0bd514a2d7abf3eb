"""What a worker says of its GPU, with a torch that is just as much of one as it looks at."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from stagetrace import marks
from stagetrace.assemble import Assembler
from stagetrace.marks import TextMark
from stagetrace_vllm import device_hooks

UUID = "5a1b0c3d-0000-1111-2222-333344445555"


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, str]]:
    found: list[tuple[int, int, str]] = []
    monkeypatch.setattr(device_hooks.recorder, "text", lambda *text: found.append(text))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return found


def worker(monkeypatch: pytest.MonkeyPatch, kind: str = "cuda", index: int = 0, **properties: Any) -> Any:
    """A worker of rank 3 of the second engine, and the card that torch says it has."""
    card = SimpleNamespace(name="NVIDIA H100 80GB HBM3", **properties)
    torch = SimpleNamespace(cuda=SimpleNamespace(get_device_properties=lambda device: card))
    monkeypatch.setitem(sys.modules, "torch", torch)
    return SimpleNamespace(
        device=SimpleNamespace(type=kind, index=index), rank=3, parallel_config=SimpleNamespace(data_parallel_index=1)
    )


def test_a_worker_names_its_card_once(monkeypatch: pytest.MonkeyPatch, said: list[Any]) -> None:
    device_hooks.device_ready(None, worker(monkeypatch, uuid=UUID), None)
    assert said == [
        (marks.GPU, 0, f"1 3 GPU-{UUID} NVIDIA H100 80GB HBM3"), (marks.ENGINE, 0, "gpu=NVIDIA H100 80GB HBM3"),
    ]  # fmt: skip


def test_a_worker_on_a_cpu_names_none(monkeypatch: pytest.MonkeyPatch, said: list[Any]) -> None:
    device_hooks.device_ready(None, worker(monkeypatch, kind="cpu", uuid=UUID), None)
    assert said == []


@pytest.mark.parametrize(
    ("visible", "index", "properties", "expected"),
    [
        ("3,1", 1, {"uuid": UUID}, f"GPU-{UUID}"),
        ("", 0, {"uuid": f"GPU-{UUID}"}, f"GPU-{UUID}"),
        ("GPU-aa,GPU-bb", 1, {}, "GPU-bb"),
        ("MIG-aa, MIG-bb", 1, {"uuid": UUID}, "MIG-bb"),
        ("MIG-GPU-aa/3/0", 0, {"uuid": UUID}, "MIG-GPU-aa/3/0"),
        ("2", 0, {"pci_bus_id": 0x3B, "pci_device_id": 0, "pci_domain_id": 0}, "PCI-00000000:3b:00.0"),
        ("2", 0, {}, "-"),
        ("2", 5, {}, "-"),
    ],
)
def test_a_card_is_named_as_the_driver_names_it(
    monkeypatch: pytest.MonkeyPatch, visible: str, index: int, properties: dict[str, Any], expected: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert device_hooks.identifier(SimpleNamespace(**properties), index) == expected


def test_assembly_keeps_it_by_process() -> None:
    assembler = Assembler(lambda pid: True)
    for pid, rank in ((71, 0), (72, 1)):
        assembler.take(TextMark(5, marks.GPU, 0, f"0 {rank} GPU-{rank} A card"), pid)
    assert assembler.book.gpus == {71: "0 0 GPU-0 A card", 72: "0 1 GPU-1 A card"}
