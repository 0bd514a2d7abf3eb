"""Never hurt the host: a failing hook is counted, logged once, and switched off after a few failures."""

from __future__ import annotations

import logging
from collections.abc import Callable

MAX_FAILURES = 5

log = logging.getLogger("stagetrace")


class Guard:
    """One hook's switch. ``off`` makes the wrapper call straight through.

    Only ``Exception`` is contained by callers: KeyboardInterrupt, SystemExit and CancelledError are the host's.
    """

    def __init__(self, name: str, report: Callable[[str, str], None] | None = None) -> None:
        self.name = name
        self.off = False
        self.failures = 0
        self._report = report

    def contain(self, function: Callable[..., None]) -> Callable[..., None]:
        """``function`` for whoever calls it unguarded: what it raises stays here, and after a few times it rests."""

        def call(*args: object) -> None:
            if self.off:
                return
            try:
                function(*args)
            except Exception as error:
                self.failed(error)

        return call

    def failed(self, error: Exception) -> None:
        """Note a failure of our own code; itself never raises."""
        self.failures += 1
        try:
            kind = type(error).__name__
            if self.failures == 1:
                log.warning("stagetrace: hook %s failed (%s); its stage may be missing", self.name, kind)
            if self.failures >= MAX_FAILURES:
                self.off = True
            if self._report and (self.failures == 1 or self.off):
                self._report(self.name, f"{'removed' if self.off else 'failing'} {kind}")
        except Exception:
            self.off = True
