"""The script for a GPU, where there is none: what it says, how it ends, and, on paper, that it runs at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import nvml
from tests.gpu.__main__ import PARTS, run, verdict
from tests.gpu.nvml import COMPARED, parsed
from tests.gpu.part import NotHere, Part
from tests.nvml.stub import Card, Script

REPO = Path(__file__).resolve().parents[2]
ON_PAPER = ("events-eager", "events-graph", "events-overlapped", "no-synchronisation", "overhead")


def sound(out: Path, rehearsal: bool) -> dict[str, dict[str, Any]]:
    """The parts by name, of a document whose form is as documented."""
    document = json.loads(out.read_text())
    assert document.keys() == {"schema", "taken_utc", "rehearsal", "machine", "parts"}
    assert (document["schema"], document["rehearsal"]) == (1, rehearsal)
    assert document["machine"].keys() >= {"system", "cpus", "python", "torch", "vllm", "gpu", "cuda", "stagetrace"}
    for part in document["parts"]:
        assert part.keys() == {"name", "state", "reason", "seconds", "checks", "figures"}
        assert part["state"] in ("passed", "failed", "not_run", "rehearsed")
        assert part["reason"] if part["state"] in ("failed", "not_run") else True
        for check in part["checks"]:
            assert check.keys() == {"what", "value", "limit", "unit", "ok"}
            assert check["ok"] == (check["value"] <= check["limit"])
    return {part["name"]: part for part in document["parts"]}


def called(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """``python -m tests.gpu``, on a machine that shows no GPU."""
    return subprocess.run(
        [sys.executable, "-m", "tests.gpu", *map(str, arguments)],
        cwd=REPO, env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment}, capture_output=True, text=True,
        timeout=240,
    )  # fmt: skip


def test_without_a_gpu_it_measures_nothing_and_says_so(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    done = subprocess.run(
        ["sh", "tests/gpu/run.sh", str(out)], cwd=REPO, capture_output=True, text=True, timeout=240,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable, "WHEELS": str(tmp_path / "none")},
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    found = sound(out, rehearsal=False)
    assert found.keys() == PARTS.keys()
    for name, part in found.items():
        assert part["state"] == "not_run" and not part["checks"] and not part["figures"]
        assert f"not_run  {name}: {part['reason']}" in done.stdout
    assert json.loads(out.read_text())["machine"]["gpu"] is None


def test_rehearsed_on_paper_it_claims_nothing(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    done = called("--out", out, "--rehearse", "--parts", ",".join(ON_PAPER))
    assert done.returncode == 3, done.stdout + done.stderr
    found = sound(out, rehearsal=True)
    assert {name: part["state"] for name, part in found.items()} == dict.fromkeys(ON_PAPER, "rehearsed")
    held = {check["what"]: check["ok"] for name in ON_PAPER for check in found[name]["checks"]}
    for what in (
        "placed before it was asked for",
        "leases while a graph is captured",
        "steps of 20 that could not be read",
    ):
        assert held[what], found
    # The device on paper takes two milliseconds for the forward, and half a one until the event behind it.
    assert found["events-eager"]["figures"]["forward_us"]["events"] > 2_450


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--out", "x.json", "--parts", "nvml,nothing"), "there is no nothing; choose from events-eager"),
        (("--out", "nowhere/x.json"), "--out: there is no directory nowhere"),
        ((), "--out"),
    ],
)
def test_bad_arguments(arguments: tuple[str, ...], says: str) -> None:
    done = called(*arguments)
    assert done.returncode == 2 and says in done.stderr.splitlines()[-1]


def test_an_interpreter_that_is_not_there(tmp_path: Path) -> None:
    done = subprocess.run(
        ["sh", "tests/gpu/run.sh"], cwd=REPO, capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHON": str(tmp_path / "python")},
    )  # fmt: skip
    assert done.returncode == 2 and "name an interpreter" in done.stderr


def held(*values: float, rehearsal: bool = False) -> Part:
    part = Part("some", rehearsal, 0.0)
    for value in values:
        part.hold("it", value, 2.0, "µs")
    part.done()
    return part


def test_how_it_ends() -> None:
    good, bad, tried, left_out = held(1.0, 2.0), held(1.0, 2.5), held(9.0, rehearsal=True), Part("some", False, 0.0)
    assert [part.state for part in (good, bad, tried, left_out)] == ["passed", "failed", "rehearsed", "not_run"]
    assert verdict([good, left_out]) == 0
    assert verdict([good, bad]) == verdict([bad, left_out]) == 1
    assert verdict([tried, left_out]) == verdict([left_out]) == 3
    assert bad.reason == "it: 2.5 µs, at most 2"


def test_a_part_that_breaks_down_is_one_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(error: Exception) -> Any:
        def part(_: Part) -> None:
            raise error

        return part

    monkeypatch.setitem(PARTS, "nvml", breaks(ZeroDivisionError("no")))
    assert (run("nvml", False, 0.0).state, run("nvml", False, 0.0).reason) == ("failed", "ZeroDivisionError: no")
    monkeypatch.setitem(PARTS, "nvml", breaks(NotHere("no driver")))
    assert (run("nvml", False, 0.0).state, run("nvml", False, 0.0).reason) == ("not_run", "no driver")


def test_what_nvidia_smi_says() -> None:
    assert parsed("35, 1024, 71.23, 1980, 3201, 34\n") == dict(
        zip(COMPARED, (35, 1024, 71.23, 1980, 3201, 34), strict=True)
    )
    assert parsed("[N/A], 1024, [Not Supported], 1980, 3201, 34\n").keys() == COMPARED.keys() - {
        "utilization.gpu", "power.draw"
    }  # fmt: skip


SMI = """#!/bin/sh
test "$2" = --query-gpu=utilization.gpu,memory.used,power.draw,clocks.sm,clocks.mem,temperature.gpu || exit 1
echo "50, 57220, 131.50, 1980, [N/A], 75"
"""


def test_counters_of_a_card_on_paper(tmp_path: Path) -> None:
    """The real bindings, a stub of the driver's library, and a program that is called `nvidia-smi`."""
    program = tmp_path / "nvidia-smi"
    program.write_text(SMI)
    program.chmod(0o755)
    variables = Script([Card(curves={"power": ((0, 100.0),)})]).write(tmp_path)
    out = tmp_path / "gpu.json"
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    done = called("--out", out, "--rehearse", "--parts", "nvml", PATH=path, **variables)
    assert done.returncode == 3, done.stdout + done.stderr
    part = sound(out, rehearsal=True)["nvml"]
    assert part["state"] == "rehearsed", part
    assert part["figures"]["power.draw"] == {
        "nvidia_smi": 131.5, "nvml": [100.0, 100.0], "sampler": [pytest.approx(100.0, rel=1e-3)] * 2
    }  # fmt: skip
    held = {check["what"]: (check["value"], check["ok"]) for check in part["checks"]}
    for who in ("nvml", "sampler"):
        assert held[f"power.draw: {who} and nvidia-smi apart"] == (pytest.approx(31.5, rel=1e-3), True)
        assert held[f"temperature.gpu: {who} and nvidia-smi apart"] == (20.0, False)
        assert f"clocks.mem: {who} and nvidia-smi apart" not in held
    assert len(held) == 10


def test_without_a_driver_there_are_no_counters(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    done = called("--out", out, "--rehearse", "--parts", "nvml")
    assert done.returncode == 3, done.stdout + done.stderr
    assert sound(out, rehearsal=True)["nvml"]["state"] == "not_run"


def test_what_lies_between_two_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "busy", lambda on: None)
    monkeypatch.setattr(nvml, "smi", lambda: {"power.draw": 300.0, "clocks.sm": 1980.0, "memory.used": 10.0})
    readings = iter([{"power.draw": 250.0, "clocks.sm": 1900.0}, {"power.draw": 310.0, "clocks.sm": 1950.0}])
    found = nvml.between(None, {"sampler": lambda: next(readings)})  # type: ignore[arg-type]
    assert (
        found["power.draw"] == {"nvidia_smi": 300.0, "sampler": [250.0, 310.0]}
        and "sampler" not in found["memory.used"]
    )
    assert [nvml.distance(found[name], "sampler") for name in ("power.draw", "clocks.sm")] == [0.0, 30.0]
