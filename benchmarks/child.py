"""One row in a process of its own: what an earlier row has imported or allocated cannot touch it.

The child writes JSON lines to stdout: ``{"done", "total", "text"}`` while it goes on, ``{"outcome"}`` at the end. What
else it or the engine prints goes to a log, which is shown when the row fails.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from .figures import Figure, Options, Outcome, Progress
from .rows import Row, named

LOG_LINES = 15
#: A recorded or instrumented parent must not be what is measured.
WITHHELD = ("STAGETRACE", "STAGETRACE_SESSION")


class RowFailed(Exception):
    """The end of the row's log."""


def run_apart(row: Row, options: Options, show: Callable[[int, int, str], None]) -> Outcome:
    """Run ``row`` in a process of its own; ``show`` is told how far it is."""
    environment = {key: value for key, value in os.environ.items() if key not in WITHHELD}
    command = [sys.executable, "-m", "benchmarks.child", row.key, json.dumps(asdict(options))]
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        child = subprocess.Popen(
            command, env=environment, cwd=Path(__file__).resolve().parents[1], stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip
        try:
            assert child.stdout is not None
            outcome = _follow(child.stdout, show)
            child.wait()
        finally:
            # It takes its servers along.
            child.terminate()
            child.wait()
        if outcome is None:
            log.seek(0)
            raise RowFailed("\n".join(log.read().splitlines()[-LOG_LINES:]))
        return outcome


def _follow(lines: IO[str], show: Callable[[int, int, str], None]) -> Outcome | None:
    for line in lines:
        said = json.loads(line)
        if "outcome" in said:
            found = said["outcome"]
            return Outcome([Figure.from_json(figure) for figure in found["figures"]], found["notes"])
        show(said["done"], said["total"], said["text"])
    return None


def main(key: str, options: Options) -> None:
    """Run the row ``key`` here."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # The engine prints to stdout too; ours is set aside, and 1 leads to the log.
    stdout = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(document: dict[str, Any]) -> None:
        print(json.dumps(document), file=stdout)

    progress = Progress(lambda done, total, text: say({"done": done, "total": total, "text": text}))
    outcome = named(key).run(options, progress)
    say({"outcome": {"figures": [figure.as_json() for figure in outcome.figures], "notes": outcome.notes}})


if __name__ == "__main__":
    main(sys.argv[1], Options(**json.loads(sys.argv[2])))
