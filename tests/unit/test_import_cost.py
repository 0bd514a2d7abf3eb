"""What a host pays before it asks for anything: which modules are loaded. (More of it: test_architecture.py.)"""

from __future__ import annotations

from pathlib import Path

import pytest

from stagetrace import session
from tests.unit.helpers import python

#: Slow to import, or an engine, or what only the collector needs.
HEAVY = (
    "asyncio",
    "json",
    "logging",
    "multiprocessing",
    "opentelemetry",
    "rich",
    "sqlite3",
    "subprocess",
    "typer",
    "wrapt",
)
ENGINES = ("torch", "transformers", "vllm")


def loaded(code: str, **environment: str) -> set[str]:
    done = python(f"import sys\nbefore = set(sys.modules)\n{code}\nprint(*(set(sys.modules) - before))", **environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return {name.partition(".")[0] for name in done.stdout.split()}


def test_import_stagetrace() -> None:
    assert loaded("import stagetrace").isdisjoint({*HEAVY, *ENGINES})


def test_the_functions_of_stagetrace_without_an_engine() -> None:
    code = "import stagetrace\nassert not stagetrace.status()['recording']\nassert stagetrace.flush()\n"
    code += "stagetrace.uninstrument()"
    assert loaded(code).isdisjoint({"opentelemetry", "rich", "sqlite3", "typer", "wrapt", *ENGINES})


def test_the_plug_in_where_nobody_asked_for_it() -> None:
    """An engine loads every plug-in that is installed, in each of its processes."""
    code = "import stagetrace_vllm\nstagetrace_vllm.plugin()"
    assert loaded(code).isdisjoint({"opentelemetry", "rich", "sqlite3", "typer", "wrapt", *ENGINES})
    assert loaded(code, STAGETRACE="0").isdisjoint({"wrapt", *ENGINES})


@pytest.mark.parametrize("how", ["session", "STAGETRACE"])
def test_the_plug_in_where_somebody_did(directory: Path, how: str) -> None:
    environment = {session.ENV: str(directory)} if how == "session" else {"STAGETRACE": "1"}
    found = loaded("import stagetrace_vllm\nstagetrace_vllm.plugin()", **environment)
    assert "wrapt" in found
    assert found.isdisjoint({"opentelemetry", "rich", "sqlite3", "typer", *ENGINES})
    assert list(directory.iterdir()) == []
