"""The composite action: its steps, run as the scripts they are."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.test_gate import stores

REPO = Path(__file__).resolve().parents[2]
ACTION = yaml.safe_load((REPO / "action.yml").read_text())
__all__ = ["stores"]


def evaluated(text: str, inputs: dict[str, str]) -> str:
    """An expression of the action, as GitHub would put it in."""
    known = {f"inputs.{name}": inputs.get(name, given["default"]) for name, given in ACTION["inputs"].items()}
    known["github.action_path"] = str(REPO)
    return re.sub(r"\$\{\{ ([\w.-]+) \}\}", lambda match: known[match[1]], text)


class Job:
    """Runs the steps one after the other, as a runner does, until one fails."""

    def __init__(self, folder: Path) -> None:
        self.summary, self.output, self.temp = folder / "summary.md", folder / "output", folder / "temp"
        self.temp.mkdir()
        self.output.touch()

    def __call__(self, **inputs: str) -> tuple[int, dict[str, str], str]:
        """Exit code, outputs, and what was printed."""
        names = {name.replace("_", "-"): value for name, value in inputs.items()}
        assert names.keys() <= ACTION["inputs"].keys()
        printed = ""
        for step in ACTION["runs"]["steps"]:
            assert step["shell"] == "bash"
            variables = {name: evaluated(text, names) for name, text in step["env"].items()}
            done = subprocess.run(
                ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
                capture_output=True, text=True, timeout=240, cwd=self.temp.parent,
                env={
                    **os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
                    "GITHUB_STEP_SUMMARY": str(self.summary), "GITHUB_OUTPUT": str(self.output),
                    "RUNNER_TEMP": str(self.temp), "COLUMNS": "200", **variables,
                },
            )  # fmt: skip
            printed += done.stdout + done.stderr
            if done.returncode:
                break
        lines = self.output.read_text().splitlines()
        return done.returncode, dict(line.split("=", 1) for line in lines), printed


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_a_slower_server_fails_the_job(job: Job, stores: Callable[..., Any]) -> None:
    before, after = stores({"prefill": 0.25})
    code, outputs, printed = job(baseline="a*.db", current="\n".join(after))
    assert (code, outputs["verdict"]) == (1, "FAIL"), printed
    assert "What carried the change: prefill" in printed
    assert "❌ FAIL" in job.summary.read_text()
    assert 'name="prefill"><failure' in Path(outputs["junit"]).read_text()
    assert len(before) == 5


def test_nothing_changed(job: Job, stores: Callable[..., Any]) -> None:
    stores()
    code, outputs, printed = job(baseline="a*.db", current="b*.db", arguments="--budget\nttft_p95 <= 10s\n")
    assert (code, outputs["verdict"]) == (0, "PASS"), printed
    assert "budget ttft_p95 <= 10s" in printed
    code, outputs, printed = job(baseline="a*.db", current="b*.db", arguments="--json\n--markdown\ncomment.md")
    assert (code, outputs["verdict"]) == (0, "PASS") and '"verdict": "PASS"' in printed


def test_one_job_may_compare_several_pairs(job: Job, stores: Callable[..., Any]) -> None:
    stores(runs=1)
    first, second = (job(baseline="a*.db", current="b*.db")[1]["junit"] for _ in range(2))
    assert first != second and Path(first).is_file() and Path(second).is_file()
    folders = [path / "runs" for path in job.temp.iterdir()]
    assert len(folders) == 2 and not any(folder.exists() for folder in folders), (
        "--ab makes it, and refuses one there is"
    )


def test_too_few_runs_pass_unless_told_otherwise_and_say_so(job: Job, stores: Callable[..., Any]) -> None:
    stores(runs=1)
    assert job(baseline="a*.db", current="b*.db")[:1] == (0,)
    code, outputs, _ = job(baseline="a*.db", current="b*.db", inconclusive="fail")
    assert (code, outputs["verdict"]) == (1, "INCONCLUSIVE")
    assert job.summary.read_text().count("❔ INCONCLUSIVE") == 2


def test_unusable_input_is_neither(job: Job) -> None:
    code, outputs, printed = job(baseline="gone.json", current="gone.db")
    assert (code, outputs["verdict"]) == (2, "") and "gone.json: No such file" in printed
    assert not Path(outputs["junit"]).exists()
    assert "gone.json: No such file" in job.summary.read_text()
    code, _, printed = job(baseline="base.json")
    assert code == 2 and "give command-a and command-b, or baseline and current" in printed
    code, _, printed = job(command_a="'$(touch injected)' --port {port}", command_b="x --port {port}")
    assert code == 2 and "no program $(touch injected)" in printed
    assert not (job.temp.parent / "injected").exists()
