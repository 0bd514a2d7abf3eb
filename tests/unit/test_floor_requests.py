"""Floors on recorded requests: the work that a stage's time was spent on, held against the engine's own device."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from stagetrace.assemble.floors import config_of
from stagetrace.floor import Rates, decode_pass, embedding, lm_head, model_of, prefill, sample
from stagetrace.floor.engine import Yardstick, model_config, yardstick
from stagetrace.model import RequestRecord, RunRecord
from stagetrace.report.requests import print_stopwatches
from stagetrace.stages import FLOOR
from stagetrace_otlp.spans import flat
from stagetrace_vllm import model_facts
from tests.invariants import check_all
from tests.unit.scripted import Ask, Script
from tests.unit.test_floor import config, device
from tests.unit.test_floor_models import PARAMETERS, ROUNDED

TINY = config("llama-3.1-8b") | {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
                                 "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 500}  # fmt: skip
MODEL = model_of(TINY)
RATES = Rates.of(device("reference"), MODEL)
ON_DEVICE = ("embedding", "prefill", "lm_head", "sample", "decode")


def settings(model: dict[str, Any] = TINY, **more: str) -> dict[str, str]:
    """As an engine says them: the config in pieces."""
    text = json.dumps(model)
    return {f"model_config.{i // 100}": text[i : i + 100] for i in range(0, len(text), 100)} | more


def played(*asks: Ask, gpu: str | None = "reference", more: dict[str, str] | None = None, **options: Any) -> Script:
    return Script(settings=settings(**(more or {})), against=gpu, **options).run(*asks)


def floor(record: RequestRecord, key: str) -> Any:
    return record.stage(key).attributes["floor_ms"]


def ms(*works: Any) -> Any:
    return pytest.approx(sum(map(RATES.ms, works)), rel=1e-12)


@pytest.mark.parametrize("cached", [0, 16])
def test_a_request_alone_costs_what_its_lengths_do(cached: int) -> None:
    (record,) = played(Ask(prompt=40, output=6, cached=cached)).records()
    new = 40 - cached
    assert floor(record, "embedding") == ms(embedding(MODEL, new))
    assert floor(record, "prefill") == ms(prefill(MODEL, new, cached))
    assert floor(record, "lm_head") == ms(lm_head(MODEL))
    assert floor(record, "sample") == ms(sample(MODEL))
    steps = record.stage("decode").attributes["floor_steps"]
    assert 4 <= steps <= 5  # the first may have begun before the first text was sent
    assert floor(record, "decode") == ms(*(decode_pass(MODEL, 40 + k) for k in range(6 - steps, 6)))
    facts = record.stage("prefill").attributes
    assert facts["flop"] == 2 * MODEL.parameters * new + 4 * 2 * 64 * new * 40


def test_what_was_reached_is_the_exact_work_over_the_time() -> None:
    (record,) = played(Ask(prompt=40, output=6)).records()
    for key in ON_DEVICE:
        stage = record.stage(key)
        facts, took = stage.attributes, stage.duration_ms
        assert took and facts["over_floor"] == pytest.approx(took / facts["floor_ms"])
        bounds = (facts["achieved_gb_per_s"] / 2680, facts["achieved_tflop_per_s"] / 396)
        # Where one of the two bounds all of it, the floor is that one's share of the peak.
        assert max(bounds) == pytest.approx(1 / facts["over_floor"])
    work = prefill(MODEL, 40)
    prefilled = record.stage("prefill")
    assert prefilled.attributes["achieved_tflop_per_s"] * prefilled.duration_ms * 1e9 == pytest.approx(work.flop)
    assert prefilled.attributes["achieved_gb_per_s"] * prefilled.duration_ms * 1e6 == pytest.approx(work.bytes)


def test_chunks_read_the_weights_again() -> None:
    (record,) = played(Ask(prompt=150, output=2), budget=64).records()
    assert record.stage("prefill").attributes["chunks"] == 3
    assert floor(record, "prefill") == ms(
        prefill(MODEL, 64), prefill(MODEL, 64, cached=64), prefill(MODEL, 22, cached=128)
    )


def test_company_in_a_step_is_computed_too() -> None:
    script = played(Ask(prompt=20, output=30), Ask(at=10_000_000, prompt=30, output=3))
    first, second = script.records()
    step = next(step for step in script.steps if any(row[0] is script.roots[1].seqs[0] for row in step.rows))
    assert len(step.rows) == 2
    assert floor(second, "prefill") == ms(prefill(MODEL, 30, mates=1))
    assert floor(second, "lm_head") == ms(lm_head(MODEL, 2)) and floor(second, "sample") == ms(sample(MODEL, 2))
    alone = [decode_pass(MODEL, 20 + k) for k in range(1, 30)]
    assert floor(first, "decode") > ms(*alone[:1]).expected
    assert first.stage("decode").attributes["bytes_read"] > alone[0].bytes * 25


def test_drafts_are_computed_whether_accepted_or_not() -> None:
    script = played(Ask(prompt=20, output=12), drafts=3)
    (record,) = script.records()
    passes = [
        (computed + tokens, tokens)
        for step in script.steps
        for _, tokens, computed, _ in step.rows
        if step.forward[0] >= record_time(record, script)
    ]
    assert any(tokens > 1 for _, tokens in passes)
    assert floor(record, "decode") == ms(*(decode_pass(MODEL, context, tokens) for context, tokens in passes))


def record_time(record: RequestRecord, script: Script) -> int:
    """When stage 11 began, on the script's clock."""
    start = record.stage("decode").start_ms
    assert start is not None
    return round(script.roots[0].started + start * 1e6)


@pytest.mark.parametrize(
    "options", [{}, {"depth": 2}, {"budget": 24}, {"drafts": 3}, {"slots": 2}, {"device": "events", "depth": 2}]
)
def test_stages_count_no_pass_that_is_not_in_their_time(options: dict[str, Any]) -> None:
    """Slow clients, evictions, stop strings, company: a pass before the first text or after the end is not decode's."""
    asks = (
        Ask(prompt=30, output=12, slower=3_000_000), Ask(prompt=20, output=9, evict=(0, 3)),
        Ask(prompt=40, output=8, stop_at=4), Ask(prompt=10, output=2, silent=1), Ask(prompt=10, output=1),
    )  # fmt: skip
    script = played(*asks, **options)
    records = script.records()
    check_all(records, complete=True)
    for record, root in zip(records, script.roots, strict=True):
        decode = record.stage("decode")
        inside = decode.attributes.get("floor_steps") or 0
        if decode.state != "measured":
            assert not inside
            continue
        assert decode.start_ms is not None and decode.duration_ms is not None
        start = root.started + decode.start_ms * 1e6
        held = [s for s in script.steps if any(r[0] is root.seqs[0] for r in s.rows)]
        assert inside <= sum(1 for s in held if start - 1 <= s.forward[0] <= start + decode.duration_ms * 1e6 + 1)
        assert (decode.attributes["floor_ms"] is None) == (inside == 0)


def test_what_was_cut_short_is_held_against_nothing() -> None:
    (record,) = played(Ask(prompt=60, output=50, abort_at=9_000_000)).records()
    assert record.active_stage == "decode"
    assert all(record.stage("decode").attributes.get(name) is None for name in FLOOR)
    assert floor(record, "prefill") > 0


def test_a_stage_that_nobody_timed_has_a_floor_and_no_ratio() -> None:
    (record,) = played(Ask(prompt=40, output=6), device="launches").records()
    stage = record.stage("prefill")
    assert stage.state == "not_observable" and floor(record, "prefill") == ms(prefill(MODEL, 40))
    assert stage.attributes.get("over_floor") is None and record.stage("decode").attributes["over_floor"] > 0


def test_what_is_pooled_has_no_head() -> None:
    (record,) = played(Ask(prompt=40, kind="embedding")).records()
    assert floor(record, "prefill") == ms(prefill(MODEL, 40))
    assert "floor_ms" not in record.stage("lm_head").attributes


@pytest.mark.parametrize(
    ("more", "gpu", "says"),
    [
        ({}, None, "no GPU was seen; STAGETRACE_GPU=NAME names"),
        ({}, "voodoo", "no rates are known of STAGETRACE_GPU=voodoo;"),
        ({"gpu": "NVIDIA H100 80GB HBM3 MIG 1g.10gb"}, None, "no rates are known of NVIDIA H100 80GB HBM3 MIG"),
        ({"pipeline_parallel": "2"}, "H100", "with pipeline parallelism"),
        ({"expert_parallel": "1", "data_parallel": "2"}, "H100", "with experts spread over several engines"),
        ({"model": {"model_type": "mamba"}}, "H100", "the model's config: model_type mamba is not known"),
        ({"model_config.0": "", "model_config.1": "x"}, "H100", "the engine has not said how its model is built"),
    ],
)  # fmt: skip
def test_without_a_yardstick_every_figure_is_null_and_it_says_why(
    more: dict[str, Any], gpu: str | None, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    script = played(Ask(), Ask(at=10**9), gpu=gpu, more=more)
    assembler = script.assembler()
    for mark, pid in script.read():
        assembler.take(mark, pid)
    records = script.settle(assembler)
    for record in records:
        for key in ON_DEVICE:
            assert [record.stage(key).attributes[name] for name in FLOOR] == [None] * 4
    facts = assembler.floors.facts()
    assert facts["floor_missing"].startswith(says) and "floor_gpu" not in facts
    print_stopwatches(records, SimpleNamespace(), [RunRecord("s", config=facts)])  # type: ignore[arg-type]
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count("No floors: ") == 1 and says.split(";")[0] in printed and "× floor" not in printed


def test_a_worker_names_its_card_and_a_person_another() -> None:
    seen = {"gpu": "NVIDIA H100 80GB HBM3", "tensor_parallel": "4"}
    own, other = (yardstick(settings(**seen), named) for named in (None, "L4"))
    assert isinstance(own, Yardstick) and isinstance(other, Yardstick)
    assert (own.gpu, other.gpu) == ("H100", "L4")
    assert own.rates.bytes == 4 * 3350e9 and own.rates.wide == 4 * 989e12


def test_the_stopwatch_has_a_column_and_exports_have_units(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    records = played(Ask(prompt=40, output=6)).records()
    print_stopwatches(records, SimpleNamespace(), [RunRecord("s", config={"floor_gpu": "reference"})])  # type: ignore[arg-type]
    out = capsys.readouterr().out
    assert "× floor" in out.splitlines()[1] and "floor_ms=" in out and "achieved_tflop_per_s=" in out
    assert out.count("× floor: times as long as reference needs at least") == 1
    line = next(line for line in out.splitlines() if line.startswith(" 7 "))
    over = records[0].stage("prefill").attributes["over_floor"]
    assert f"{over:,.1f}" in line
    names = flat("stagetrace", records[0].stage("prefill").attributes)
    assert {"stagetrace.floor_ms", "stagetrace.over_floor", "stagetrace.achieved_tflop_per_s",
            "stagetrace.achieved_gb_per_s", "stagetrace.flop"} <= names.keys()  # fmt: skip


def test_a_run_has_its_config_in_one_piece() -> None:
    found = config_of(settings(gpu="x"))
    assert found == {"gpu": "x"}
    assert model_config(settings()) == TINY


# ---------------------------------------------------------------- what an engine says of its model


def engine(name: str, **changes: Any) -> Any:
    """As much of vLLM's configuration as is looked at, of a model with this config."""
    given = config(name) | changes
    text = given.get("text_config", given)
    dtype = given.pop("torch_dtype")
    outer = SimpleNamespace(**given)
    model = SimpleNamespace(hf_config=outer, hf_text_config=SimpleNamespace(**text), dtype=f"torch.{dtype}")
    return SimpleNamespace(model_config=model, cache_config=SimpleNamespace(cache_dtype="auto"))


@pytest.mark.parametrize("name", sorted(PARAMETERS.keys() | ROUNDED.keys()))
def test_what_an_engine_says_makes_the_same_model(name: str) -> None:
    pieces = dict(model_facts.model_facts(engine(name)))
    assert all(len(f"{key}={text}") <= 512 for key, text in pieces.items())
    told = model_config(pieces)
    assert told is not None
    assert model_of(told) == model_of(config(name))


def test_nothing_else_leaves_the_engine() -> None:
    secret = {"_name_or_path": "/srv/secret", "architectures": ["Secret"], "auto_map": {"A": "secret.py"}}
    quantised = {
        "quant_method": "gptq", "bits": 4, "group_size": 128, "model_name_or_path": "secret",
        "modules_to_not_convert": ["lm_head", "layers.3.secret", "/secret", "x" * 100, 7],
    }  # fmt: skip
    secrets = {"layer_types": ["secret" * 20], "topk_method": "/secret"}
    made = engine("llama-3.1-8b", **secret, **secrets, quantization_config=quantised)
    told = "".join(dict(model_facts.model_facts(made)).values())
    assert "secret" not in told and "gptq" in told


def test_quantised_when_loaded() -> None:
    made = engine("llama-3.1-8b")
    made.model_config.quantization = "fp8"
    made.cache_config.cache_dtype = "fp8_e4m3"
    told = model_facts.model_config(made)
    model = model_of(told)
    assert model.precision.compute == "fp8" and model.kv_bytes_per_token == 65_536
