"""The floor's counts beside an implementation of each model: as many weights, to the last one, and nothing loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

MODELS = Path(__file__).parents[1] / "data" / "models"
COUNT = """
import json, sys
from pathlib import Path
import torch
from transformers import AutoConfig, AutoModelForCausalLM

counts = {}
for path in sorted(Path(sys.argv[1]).glob("*.json")):
    given = json.loads(path.read_text())
    given.pop("quantization_config", None)
    made = AutoConfig.for_model(given.pop("model_type"), **given).get_text_config()
    made.num_hidden_layers = layers = min(made.num_hidden_layers, 5)
    if getattr(made, "layer_types", None):
        made.layer_types = made.layer_types[:layers]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(made)
    model.tie_weights()
    fields = made.to_dict() | {"dtype": "bfloat16"}
    counts[path.stem] = [sum(p.numel() for p in {id(p): p for p in model.parameters()}.values()), fields]
print(json.dumps(counts, default=str))
"""


def test_every_model_has_the_weights_that_its_implementation_has(engine: object) -> None:
    """Five layers of each: enough for every kind of layer there is, and made in seconds."""
    from stagetrace.floor import model_of

    done = subprocess.run([sys.executable, "-c", COUNT, str(MODELS)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    counts = json.loads(done.stdout.splitlines()[-1])
    assert len(counts) >= 10
    for name, (weights, fields) in counts.items():
        # A bias that corrects the choice of experts is no parameter there, but a buffer.
        correction = 256 * 2 if name == "deepseek-v3" else 0
        assert model_of(fields).parameters - correction == weights, name
