"""What devices can do at most: published peaks without sparsity, and memory bandwidth.

Sources are the makers' data sheets and white papers, which docs/floor.md names row by row. A device that is not here
has no floor: nothing is guessed from a name that looks alike. Names are those that drivers report, and short ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

#: Number formats that a device may have units for.
FORMATS = ("fp32", "bf16", "fp8", "int8", "fp4")


@dataclass(frozen=True)
class Device:
    """Peaks in TFLOP/s (TOP/s) by number format, GB/s (10⁹ bytes) and GiB, of one device.

    ``bf16`` is fp16's peak, too; ``fp32`` that of matrix units on fp32 inputs (TF32). A format that is not in
    ``tflops`` has no units of its own: it is computed in bf16.
    """

    name: str
    tflops: Mapping[str, float]
    gb_per_s: float
    memory_gb: float | None = None
    reported: tuple[str, ...] = ()
    #: Whether 16 bits are bf16, too; fp16 only where not.
    bf16: bool = True

    def peak_tflops(self, form: str) -> float:
        """The peak in a number format; bf16's where it has none of its own."""
        return self.tflops.get("bf16" if form == "fp16" else form, self.tflops["bf16"])

    def computed_in(self, form: str) -> str:
        """The number format whose peak that is."""
        sixteen = "bf16" if self.bf16 else "fp16"
        return form if form == "fp16" or (form in self.tflops and form != "bf16") else sixteen


def _row(name: str, fp32: float, bf16: float, fp8: float | None, int8: float | None, gb_per_s: float, memory: float,
         *reported: str, fp4: float | None = None, has_bf16: bool = True) -> Device:  # fmt: skip
    peaks = zip(FORMATS, (fp32, bf16, fp8, int8, fp4), strict=True)
    return Device(name, {k: v for k, v in peaks if v is not None}, gb_per_s, memory, reported, has_bf16)


#: The worked example's own rates: 34.2 TFLOP in 86.4 ms, 16.06 GB in 6.0 ms. What was reached, not a card's peak.
REFERENCE = Device("reference", {"bf16": 396.0}, 2680.0)

DEVICES: tuple[Device, ...] = (
    REFERENCE,
    # name             fp32   bf16    fp8    int8   GB/s  GB   names that drivers report
    _row("T4", 8.1, 65, None, 130, 320, 16, "Tesla T4", has_bf16=False),
    _row("A10", 62.5, 125, None, 250, 600, 24, "NVIDIA A10"),
    _row("A10G", 35, 70, None, 140, 600, 24, "NVIDIA A10G"),
    _row("A30", 82, 165, None, 330, 933, 24, "NVIDIA A30"),
    _row("A40", 74.8, 149.7, None, 299.3, 696, 48, "NVIDIA A40"),
    _row("A100-40GB", 156, 312, None, 624, 1555, 40,
         "NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB", "A100-SXM4-40GB", "A100-PCIE-40GB"),
    _row("A100-80GB", 156, 312, None, 624, 2039, 80, "NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
    _row("A100-80GB-PCIe", 156, 312, None, 624, 1935, 80, "NVIDIA A100 80GB PCIe"),
    _row("RTX-3090", 35.6, 71, None, 284, 936, 24, "NVIDIA GeForce RTX 3090"),
    _row("L4", 60, 121, 242, 242, 300, 24, "NVIDIA L4"),
    _row("L40", 90.5, 181, 362, 362, 864, 48, "NVIDIA L40"),
    _row("L40S", 183, 362, 733, 733, 864, 48, "NVIDIA L40S"),
    _row("RTX-4090", 82.6, 165.2, 330.3, 660.6, 1008, 24, "NVIDIA GeForce RTX 4090"),
    _row("RTX-6000-Ada", 182.1, 364.2, 728.5, 728.5, 960, 48, "NVIDIA RTX 6000 Ada Generation"),
    _row("H100", 494, 989, 1979, 1979, 3350, 80, "NVIDIA H100 80GB HBM3", "H100-SXM"),
    _row("H100-PCIe", 378, 756, 1513, 1513, 2000, 80, "NVIDIA H100 PCIe"),
    _row("H100-NVL", 417, 835, 1671, 1671, 3900, 94, "NVIDIA H100 NVL"),
    _row("H200", 494, 989, 1979, 1979, 4800, 141, "NVIDIA H200", "H200-SXM"),
    _row("H200-NVL", 417, 835, 1671, 1671, 4800, 141, "NVIDIA H200 NVL"),
    _row("GH200-96GB", 494, 989, 1979, 1979, 4000, 96, "NVIDIA GH200 480GB"),
    _row("GH200-144GB", 494, 989, 1979, 1979, 4900, 144, "NVIDIA GH200 144G HBM3e"),
    _row("B200", 1100, 2250, 4500, 4500, 8000, 180, "NVIDIA B200", fp4=9000),
    _row("GB200", 1250, 2500, 5000, 5000, 8000, 186, "NVIDIA GB200", fp4=10000),
    _row("RTX-5090", 104.8, 209.5, 419, 838, 1792, 32, "NVIDIA GeForce RTX 5090", fp4=1676),
    _row("MI210", 45.3, 181, None, 181, 1638, 64, "AMD Instinct MI210"),
    _row("MI300X", 653.7, 1307.4, 2614.9, 2614.9, 5300, 192, "AMD Instinct MI300X", "AMD Instinct MI300X OAM"),
    _row("MI325X", 653.7, 1307.4, 2614.9, 2614.9, 6000, 256, "AMD Instinct MI325X"),
)  # fmt: skip


def find_device(name: str | None) -> Device | None:
    """The row that ``name`` belongs to, whether a driver reports it or a person wrote it; None if there is none."""
    return _BY_NAME.get(_plain(name)) if name else None


def _plain(name: str) -> str:
    return "".join(character for character in name.casefold() if character.isalnum())


_BY_NAME = {_plain(name): device for device in DEVICES for name in (device.name, *device.reported)}
