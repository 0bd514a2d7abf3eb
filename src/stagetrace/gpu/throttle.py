"""Why a card runs slower than it could, as the driver has it: a bit for each reason."""

from __future__ import annotations

#: The bits that slow a card down. Others say that it is idle, or that somebody has set its clocks.
REASONS = {
    0x04: "sw_power_cap",
    0x08: "hw_slowdown",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake",
}


def reasons(bits: int) -> list[str]:
    """The names of the reasons in ``bits``; empty where the card is not throttled."""
    return [name for bit, name in REASONS.items() if bits & bit]
