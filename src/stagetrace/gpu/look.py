"""Which cards there are on this machine, for ``stagetrace doctor``."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from .nvml import Driver, GpuFault

LIMIT_S = 3.0


@dataclass
class Found:
    """Cards, id → name; or why none can be asked, in a line."""

    cards: dict[str, str] = field(default_factory=dict)
    fault: str | None = None

    def words(self) -> str:
        """One line for a person."""
        if self.fault is not None:
            return f"no GPU counters: {self.fault}"
        return (
            f"GPU counters: {', '.join(f'{name} ({card})' for card, name in self.cards.items()) or 'no card is there'}"
        )


def look() -> Found:
    """Ask the driver; one that does not answer is given up after :data:`LIMIT_S`."""
    found = Found(fault=f"the NVIDIA driver does not answer within {LIMIT_S:.0f} s")
    thread = threading.Thread(target=_ask, args=(found,), daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    return found


def _ask(found: Found) -> None:
    try:
        driver = Driver()
        try:
            found.cards = dict(driver.cards())
        finally:
            driver.close()
        found.fault = None
    except GpuFault as fault:
        found.fault = str(fault)
    except Exception as error:  # whatever bindings of another age do
        found.fault = f"{type(error).__name__}: {error}"
