"""Who may import whom, what loads when, and the limits that keep the sources small: checked on the real files."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
ROOTS = {name: REPO / name for name in ("src", "integrations", "exporters") if (REPO / name).is_dir()}

# What runs inside an engine's processes. A name stands for the module and all below it.
RECORDER = (
    "stagetrace.api",
    "stagetrace.clock",
    "stagetrace.context",
    "stagetrace.device_events",
    "stagetrace.guard",
    "stagetrace.hooks",
    "stagetrace.marks",
    "stagetrace.parents",
    "stagetrace.plugin",
    "stagetrace.propagation",
    "stagetrace.provider",
    "stagetrace.recorder",
    "stagetrace.rings",
    "stagetrace.runtime",
    "stagetrace.session",
)
# What an engine's processes never load, not even late, and not through another module.
NOT_IN_ENGINES = (
    "stagetrace.assemble",
    "stagetrace.canary",
    "stagetrace.cli",
    "stagetrace.collect",
    "stagetrace.commands",
    "stagetrace.demo",
    "stagetrace.doctor",
    "stagetrace.export",
    "stagetrace.exporting",
    "stagetrace.floor",
    "stagetrace.gate",
    "stagetrace.gpu",
    "stagetrace.loadgen",
    "stagetrace.metrics",
    "stagetrace.numbers",
    "stagetrace.report",
    "stagetrace.store",
    "stagetrace.supervise",
    "numpy",
    "opentelemetry",
    "pynvml",
    "rich",
    "sqlite3",
    "typer",
)
# Starting the collector, as a process of its own, is all that an engine's process has to do with it.
EXCEPT = ("stagetrace.collect", "stagetrace.collect.spawn")
# The collector as a thread: loaded, with all that is behind it, only where `instrument` was given a provider.
GUEST = "stagetrace.collect.thread"

ENGINES = re.compile(r"\b(vllm|sglang|transformers)\b", re.IGNORECASE)
# What a merge leaves in a file when nobody chose.
HALF_MERGED = re.compile(r"^(<{7}|>{7}) ")
# Spelt so that this line is no hit itself.
MACHINE_PATHS = re.compile(r"(?<![\w.~-])/(?:work|root|home)" + r"/\w|/opt/" + "wheels")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 40


@cache
def modules() -> dict[str, Path]:
    """Every module of the three roots, by name."""
    found = {}
    for root in ROOTS.values():
        for path in root.rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def packages(root: str) -> list[Path]:
    return sorted(path.parent for path in ROOTS[root].glob("*/__init__.py")) if root in ROOTS else []


@cache
def imports(module: str) -> tuple[tuple[int, str], ...]:
    """Line and absolute name of all that ``module`` imports, wherever in it."""
    path = modules()[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                found.append((node.lineno, full if full in modules() else base))
    return tuple(found)


def within(name: str, group: tuple[str, ...]) -> bool:
    return any(name == member or name.startswith(member + ".") for member in group)


def where(module: str, line: int) -> str:
    return f"{modules()[module].relative_to(REPO)}:{line}"


def reached(module: str, trail: tuple[str, ...] = (), seen: set[str] | None = None) -> Iterator[tuple[str, ...]]:
    """Each import that loading ``module`` can lead to, with the places that lead there; the name comes last."""
    seen = {module} if seen is None else seen
    for line, name in imports(module):
        steps = (*trail, where(module, line))
        yield (*steps, name)
        # Importing a.b.c runs a.b too. (The top package is loaded by everything; its own test is below.)
        parents = [name.rsplit(".", depth)[0] for depth in range(name.count("."))]
        for each in parents:
            if each in modules() and each not in seen and each != GUEST:
                seen.add(each)
                yield from reached(each, steps, seen)


def test_the_names_above_exist() -> None:
    gone = [name for name in (*RECORDER, *EXCEPT, GUEST) if name not in modules()]
    assert not gone, f"renamed or removed: {gone}; bring the lists in {Path(__file__).name} up to date"


@pytest.mark.parametrize("module", sorted(name for name in modules() if within(name, RECORDER)))
def test_the_recorder_side_never_loads_the_collector_side(module: str) -> None:
    bad = [
        " -> ".join(steps)
        for steps in reached(module)
        if within(steps[-1], NOT_IN_ENGINES) and steps[-1] not in (*EXCEPT, GUEST)
    ]
    assert not bad, "an engine's process would load:\n" + "\n".join(bad)


def test_the_core_imports_no_plug_in() -> None:
    bad = [
        f"{where(module, line)} imports {name}"
        for module in modules()
        if within(module, ("stagetrace",))
        for line, name in imports(module)
        if name.startswith("stagetrace_")
    ]
    assert not bad, "\n".join(bad)


def test_integrations_use_the_plug_in_api_only() -> None:
    own = tuple(path.name for path in packages("integrations"))
    assert own
    bad = [
        f"{where(module, line)} imports {name}, not stagetrace.plugin"
        for module in modules()
        if within(module, own)
        for line, name in imports(module)
        if within(name, ("stagetrace",)) and name != "stagetrace.plugin"
    ]
    assert not bad, "\n".join(bad)


def test_exporters_use_the_exporters_api_only() -> None:
    own = tuple(path.name for path in packages("exporters"))
    assert own
    bad = [
        f"{where(module, line)} imports {name}, not stagetrace.exporting"
        for module in modules()
        if within(module, own)
        for line, name in imports(module)
        if name.startswith("stagetrace") and name.partition(".")[0] != module.partition(".")[0]
        if name != "stagetrace.exporting"
    ]
    assert not bad, "\n".join(bad)


def test_import_stagetrace_loads_next_to_nothing() -> None:
    code = "import sys; old = set(sys.modules); import stagetrace, json; print(json.dumps([*(set(sys.modules) - old)]))"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    loaded = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert "stagetrace" in loaded
    heavy = {"torch", "vllm", "transformers", "opentelemetry", "typer", "rich", "wrapt", "sqlite3"}
    assert not loaded & heavy, f"`import stagetrace` loads {sorted(loaded & heavy)}"


def test_the_core_names_no_engine() -> None:
    files = [path for path in (REPO / "src" / "stagetrace").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert files
    bad = [hit for path in files for hit in hits(path, ENGINES)]
    assert not bad, "\n".join(bad)


def test_no_path_of_a_machine_and_nothing_half_merged() -> None:
    if not (REPO / ".git").exists():
        pytest.skip("not a checkout")
    # Also what is not committed yet: this is to fail before the commit, not after.
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listing, cwd=REPO, capture_output=True, text=True, check=True).stdout.split("\0")
    files = [REPO / name for name in names if name and (REPO / name).is_file()]
    assert REPO / "pyproject.toml" in files
    bad = [hit for path in files for pattern in (MACHINE_PATHS, HALF_MERGED) for hit in hits(path, pattern)]
    assert not bad, "\n".join(bad)


def hits(path: Path, pattern: re.Pattern[str]) -> list[str]:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    found = ((number, pattern.search(line)) for number, line in enumerate(lines, 1))
    return [f"{path.relative_to(REPO)}:{number}: {match[0]}" for number, match in found if match]


def test_files_and_functions_stay_small() -> None:
    bad = []
    for path in modules().values():
        text = path.read_text(encoding="utf-8")
        if (count := len(text.splitlines())) > MAX_FILE_LINES:
            bad.append(f"{path.relative_to(REPO)}:{count}: {count} lines, {MAX_FILE_LINES} at most")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and length(node) > MAX_FUNCTION_LINES:
                limit = f"{length(node)} lines, {MAX_FUNCTION_LINES} at most"
                bad.append(f"{path.relative_to(REPO)}:{node.lineno}: {node.name}: {limit}")
    assert not bad, "\n".join(bad)


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """From ``def`` to the end, without the docstring."""
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    if ast.get_docstring(function, clean=False) is not None:
        docstring = function.body[0]
        lines -= (docstring.end_lineno or docstring.lineno) - docstring.lineno + 1
    return lines


@pytest.mark.parametrize("root", sorted(ROOTS))
def test_every_package_is_typed(root: str) -> None:
    untyped = [str(path.relative_to(REPO)) for path in packages(root) if not (path / "py.typed").is_file()]
    assert not untyped, f"py.typed is missing in {untyped}"
