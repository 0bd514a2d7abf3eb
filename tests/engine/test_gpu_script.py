"""The script for a GPU rehearsed with the real engine on the device on paper: it runs, and measures nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.unit.test_gpu_script import REPO, sound


def test_the_parts_with_the_engine(engine: object, tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    parts = "vllm-V2-graphs,vllm-V2-against-waiting"
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu", "--rehearse", "--out", str(out), "--parts", parts],
        cwd=REPO, capture_output=True, text=True, timeout=290,
    )  # fmt: skip
    assert done.returncode == 3, done.stdout[-3000:] + done.stderr[-3000:]
    found = sound(out, rehearsal=True)
    assert {part["state"] for part in found.values()} == {"rehearsed"}
    held = {check["what"]: check["ok"] for check in found["vllm-V2-graphs"]["checks"]}
    assert len(held) == 5 and all(held.values()), found["vllm-V2-graphs"]
    compared = found["vllm-V2-against-waiting"]
    assert compared["figures"]["steps"] > 15 and compared["checks"][0]["ok"], compared
