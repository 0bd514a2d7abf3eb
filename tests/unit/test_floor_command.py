"""``stagetrace floor``: the worked example in words and as JSON, and bad input in one line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from stagetrace.stages import STAGES
from tests.unit.test_cli import Cli
from tests.unit.test_floor import MODELS

LLAMA = str(MODELS / "llama-3.1-8b.json")
REFERENCE = ("--gpu", "reference", "--prompt", "2000", "--output", "300")


@pytest.fixture
def stagetrace(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Cli:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "1000")
    return Cli(monkeypatch, capfd)


def document(stagetrace: Cli, *arguments: str) -> dict[str, Any]:
    code, out, err = stagetrace("floor", "--model", LLAMA, *arguments, "--json")
    assert (code, err) == (0, "")
    found: dict[str, Any] = json.loads(out)
    return found


def test_the_document(stagetrace: Cli) -> None:
    found = document(stagetrace, *REFERENCE)
    named = ["total_ms", "ttft_ms", "kv_bytes_per_token", "kv_blocks", "ridge_batch", "weight_bytes"]
    assert list(found)[:8] == ["schema", "stages", *named] and found["schema"] == 1
    assert [(s["number"], s["key"]) for s in found["stages"]] == [(s.number, s.key) for s in STAGES]
    assert all(list(s)[:5] == ["number", "key", "flop", "bytes", "floor_ms"] for s in found["stages"])
    assert (found["kv_bytes_per_token"], found["kv_blocks"], found["ridge_batch"]) == (131_072, 125, 148)
    assert found["weight_bytes"] == 16_060_522_496
    assert round(found["stages"][6]["flop"] / 1e12, 1) == 34.2
    assert found["stages"][0]["floor_ms"] is None and found["stages"][0]["flop"] is None
    assert document(stagetrace, "--gpu", "H100")["ridge_batch"] == 295


def test_the_document_says_what_it_is_of(stagetrace: Cli) -> None:
    found = document(stagetrace, "--gpu", "A100-80GB", "--gpus", "2", "--quantization", "fp8")
    assert found["model"] == "llama"
    assert found["device"] == {
        "name": "A100-80GB", "gpus": 2, "tflop_per_s": 312, "format": "bf16", "gb_per_s": 2039, "memory_gb": 80,
    }  # fmt: skip
    assert document(stagetrace, "--gpu", "H100")["requests_that_fit"] == 211
    assert document(stagetrace, "--gpu", "H100", "--memory-gb", "16")["requests_that_fit"] == 0
    assert document(stagetrace, *REFERENCE)["requests_that_fit"] is None


def test_in_words(stagetrace: Cli) -> None:
    code, out, err = stagetrace("floor", "--model", LLAMA, *REFERENCE)
    assert (code, err) == (0, "")
    for figure in (
        "34.2 TFLOP", "29.0 TFLOP", "0.24 GiB", "125 blocks", "128 KiB", "1.05 GFLOP", "ridge at 148", "16.06 GB",
        "3.9 GiB", "1,823.3 ms", "43%", "8.03 G parameters", "0.1 ms for the head are 3.9 times too fast",
    ):  # fmt: skip
        assert figure in out, figure
    assert [line.split()[1] for line in out.splitlines()[2:14]] == [s.key for s in STAGES]


def test_notes_on_the_worked_example_are_its_own(stagetrace: Cli) -> None:
    _, out, _ = stagetrace("floor", "--model", LLAMA, "--gpu", "H100")
    assert "worked example" not in out and "ridge at 295" in out
    _, out, _ = stagetrace("floor", "--model", LLAMA, "--gpu", "reference", "--tflops", "989")
    assert "worked example" not in out


@pytest.mark.parametrize(
    ("name", "more"),
    [("qwen2.5-7b", ()), ("llama-3.1-70b", ()), ("llama-3.1-8b", ("--quantization", "fp8"))],
)
def test_another_models_figures_are_not_the_worked_examples(stagetrace: Cli, name: str, more: tuple[str, ...]) -> None:
    _, out, _ = stagetrace("floor", "--model", str(MODELS / f"{name}.json"), "--gpu", "reference", *more)
    assert "what a worked example reached" in out and "Its decode" not in out and "its prefill" not in out


def test_another_request_changes_no_figure_of_the_worked_example(stagetrace: Cli) -> None:
    asked = ("--prompt", "100", "--output", "10", "--batch", "4", "--gpus", "2")
    _, out, _ = stagetrace("floor", "--model", LLAMA, "--gpu", "reference", *asked)
    assert "1,823.3 ms for 299 passes" in out and "3.9 times too fast" in out


def test_one_is_not_many(stagetrace: Cli) -> None:
    asked = ("--gpu", "H100", "--prompt", "1", "--output", "1", "--tflops", "1e-6", "--memory-gb", "16.064")
    _, out, _ = stagetrace("floor", "--model", LLAMA, *asked)
    for words in (
        "1 prompt token, 1 output token, on",
        "1 block of 16.",
        "ridge at 1 sequence:",
        "one such request at",
    ):
        assert words in out, words


def test_more_tokens_than_positions_are_remarked_on(stagetrace: Cli) -> None:
    asked = ("floor", "--model", LLAMA, "--gpu", "H200", "--output", "72", "--prompt")
    remark = "Prompt and output are 131,073 tokens; the config's max_position_embeddings is 131,072."
    assert remark in stagetrace(*asked, "131001")[1]
    assert "max_position_embeddings" not in stagetrace(*asked, "131000")[1]


def test_a_mixture_says_what_it_assumes(stagetrace: Cli) -> None:
    _, out, _ = stagetrace("floor", "--model", str(MODELS / "mixtral-8x7b.json"), "--gpu", "H200")
    assert "Of 8 experts a token needs 2" in out and "12.9 G of them for a token" in out


def test_the_formula_is_the_one_that_was_used(stagetrace: Cli) -> None:
    asked = ("--gpu", "H100", "--prompt", "2000")
    assert "FLOP as 2NP + 4·L·d·P²; floors" in stagetrace("floor", "--model", LLAMA, *asked)[1]
    warm = (*asked, "--cached", "1999")
    assert "FLOP as 2N(P − C) + 4·L·d·P·(P − C); floors" in stagetrace("floor", "--model", LLAMA, *warm)[1]
    assert document(stagetrace, *warm)["stages"][6]["flop"] == 2 * 8_030_261_248 * 1 + 4 * 32 * 4096 * 2000 * 1


def test_whether_it_fits(stagetrace: Cli) -> None:
    big = str(MODELS / "llama-3.1-70b.json")
    assert "Does not fit: 141.1 GB of weights" in stagetrace("floor", "--model", big, "--gpu", "H100")[1]
    assert "leave room for the cache of" in stagetrace("floor", "--model", big, "--gpu", "H100", "--gpus", "2")[1]
    assert (
        "leave room for the cache of" in stagetrace("floor", "--model", big, "--gpu", "H100", "--memory-gb", "200")[1]
    )


@pytest.mark.parametrize(
    ("name", "gpu", "prompt", "fit"),
    [("gemma-3-4b-it", "L4", "130000", 5), ("mistral-7b-v0.1", "H100", "1000000", 122)],
)
def test_windows_make_long_prompts_fit(stagetrace: Cli, name: str, gpu: str, prompt: str, fit: int) -> None:
    _, out, _ = stagetrace("floor", "--model", str(MODELS / f"{name}.json"), "--gpu", gpu, "--prompt", prompt)
    assert f"leave room for the cache of {fit} such requests at most." in out


def test_whether_the_batch_fits(stagetrace: Cli) -> None:
    asked = ("floor", "--model", LLAMA, "--gpu", "H100", "--batch")
    assert "the cache of 211 such requests at most." in stagetrace(*asked, "211")[1]
    assert "the cache of 211 such requests at most: a batch of 212 does not fit." in stagetrace(*asked, "212")[1]
    warm = stagetrace(*asked, "212", "--cached", "1999")[1]
    assert "211 such requests, each with a prefix of its own, at most: a batch of 212 does not fit." in warm


@pytest.mark.parametrize(
    ("name", "gpus", "says"),
    [
        ("deepseek-v3", "8", "Tensor parallelism alone keeps the latent cache whole on every GPU: then 351 at most."),
        ("llama-3.1-8b", "16", "keeps each of 8 KV heads whole, on more than one GPU: then "),
        ("llama-3.1-8b", "6", "32 attention heads do not divide among 6 GPUs"),
        ("llama-3.1-8b", "8", None),
        ("deepseek-v2-lite", "1", None),
    ],
)
def test_a_cache_that_gpus_do_not_divide(stagetrace: Cli, name: str, gpus: str, says: str | None) -> None:
    _, out, _ = stagetrace("floor", "--model", str(MODELS / f"{name}.json"), "--gpu", "H200", "--gpus", gpus)
    assert "such requests at most." in out
    assert says in out if says else "That is" not in out


def test_a_device_of_ones_own(stagetrace: Cli) -> None:
    found = document(stagetrace, "--gpu", "thing", "--tflops", "100", "--bandwidth-gb-s", "1000")
    assert found["ridge_batch"] == 100
    assert document(stagetrace, "--gpu", "H100", "--tflops", "3350")["ridge_batch"] == 1000


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("H100", "--quantization", "fp8"), "on H100: 1,979 TFLOP/s (fp8), 3,350 GB/s"),
        (("H100", "--dtype", "fp16"), "989 TFLOP/s (fp16)"),
        (("H100", "--dtype", "fp32"), "494 TFLOP/s (fp32)"),
        (("A100-80GB", "--quantization", "fp8"), "312 TFLOP/s (bf16: no fp8 peak is known)"),
        (("MI210", "--quantization", "fp8"), "181 TFLOP/s (bf16: no fp8 peak is known)"),
        (("RTX-4090", "--quantization", "modelopt_fp4"), "165.2 TFLOP/s (bf16: no fp4 peak is known)"),
        (("T4",), "65 TFLOP/s (fp16: no bf16 peak is known)"),
        (("T4", "--dtype", "fp16"), "65 TFLOP/s (fp16), 320"),
        (("T4", "--quantization", "fp8"), "65 TFLOP/s (fp16: no fp8 peak is known)"),
        (("A100-80GB", "--quantization", "fp8", "--tflops", "100"), "100 TFLOP/s (fp8)"),
    ],
)
def test_a_rate_has_the_name_of_its_number_format(stagetrace: Cli, arguments: tuple[str, ...], says: str) -> None:
    code, out, _ = stagetrace("floor", "--model", LLAMA, "--gpu", *arguments)
    assert code == 0 and says in out.splitlines()[0]


def test_what_is_asked_of_the_model(stagetrace: Cli) -> None:
    assert document(stagetrace, "--gpu", "H100", "--kv-dtype", "fp8")["kv_bytes_per_token"] == 65_536
    assert document(stagetrace, "--gpu", "H100", "--dtype", "fp32")["weight_bytes"] == 2 * 16_060_522_496
    fp8 = document(stagetrace, "--gpu", "H100", "--quantization", "fp8")
    assert fp8["weight_bytes"] < 9.1e9 and fp8["ridge_batch"] == 295
    assert document(stagetrace, "--gpu", "H100", "--block-size", "128")["kv_blocks"] == 16
    for option, auto in (("--dtype", "auto"), ("--dtype", "BF16"), ("--kv-dtype", "AUTO")):
        assert document(stagetrace, "--gpu", "H100", option, auto) == document(stagetrace, "--gpu", "H100")
    assert document(stagetrace, "--gpu", "H100", "--quantization", "FP8") == fp8
    mixture = ("floor", "--model", str(MODELS / "mixtral-8x7b.json"), "--gpu", "H100", "--json")
    sizes = [json.loads(stagetrace(*mixture, *more)[1])["weight_bytes"] for more in ((), ("--quantization", "mxfp4"))]
    assert sizes[1] < 0.3 * sizes[0]


def test_a_model_directory(stagetrace: Cli, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_bytes(Path(LLAMA).read_bytes())
    code, out, _ = stagetrace("floor", "--model", "m", "--gpu", "H100", "--json")
    assert code == 0 and json.loads(out)["weight_bytes"] == 16_060_522_496


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "meta-llama/Llama-3.1-8B", "--gpu", "H100"], "nothing is downloaded"),
        (["--model", ".", "--gpu", "H100"], "config.json: no such file"),
        (["--model", "/dev/zero", "--gpu", "H100"], "/dev/zero: not a config.json"),
        (["--model", "text", "--gpu", "H100"], "text: not JSON"),
        (["--model", "list", "--gpu", "H100"], "list: not a JSON object"),
        (["--model", "deep", "--gpu", "H100"], "deep: not JSON"),
        (["--model", "binary", "--gpu", "H100"], "binary: not JSON"),
        (["--model", "empty", "--gpu", "H100"], "--model empty: model_type is missing"),
        (["--model", LLAMA, "--gpu", "A100"], "not in the table; did you mean A100-40GB or A100-80GB or A100"),
        (["--model", LLAMA, "--gpu", "RTX-4080"], "did you mean RTX-4090"),
        (["--model", LLAMA, "--gpu", "voodoo"], "--gpu voodoo: not in the table (reference, T4"),
        (["--model", LLAMA, "--gpu", "mine", "--tflops", "1"], "give --tflops and --bandwidth-gb-s"),
        (["--model", LLAMA, "--gpu", "H100", "--cached", "2000"], "--cached 2000: less than --prompt 2000"),
        (["--model", LLAMA, "--gpu", "H100", "--prompt", "0"], "--prompt"),
        (["--model", LLAMA, "--gpu", "H100", "--output", "-1"], "--output"),
        (["--model", LLAMA, "--gpu", "H100", "--tflops", "nan"], "--tflops"),
        (["--model", LLAMA, "--gpu", "H100", "--bandwidth-gb-s", "inf"], "--bandwidth-gb-s"),
        (["--model", LLAMA, "--gpu", "H100", "--kv-dtype", "fp3"], "stagetrace: --kv-dtype fp3 is not known; known"),
        (["--model", LLAMA, "--gpu", "H100", "--dtype", "fp3"], "stagetrace: --dtype fp3 is not known; known"),
        (
            ["--model", LLAMA, "--gpu", "H100", "--quantization", "q4"],
            "stagetrace: --quantization q4 is not known; known",
        ),
        (["--model", str(MODELS / "gpt-oss-20b.json"), "--gpu", "H100", "--quantization", "fp8"], "quantised already"),
        (["--model", LLAMA, "--gpu", "H100", "--quantization", "mxfp4"], "mxfp4: quantises experts only"),
        (["--model", LLAMA], "--gpu"),
        (["--gpu", "H100"], "--model"),
    ],
)
def test_bad_input_is_one_line(stagetrace: Cli, tmp_path: Path, arguments: list[str], says: str) -> None:
    for name, content in {
        "text": b"hello", "list": b"[]", "deep": b"[" * 100_000, "binary": bytes(range(256)), "empty": b"{}",
    }.items():  # fmt: skip
        (tmp_path / name).write_bytes(content)
    code, out, err = stagetrace("floor", *arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1 and says in err, err


def test_a_config_that_may_not_be_read(stagetrace: Cli, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        (tmp_path / "c").symlink_to(tmp_path / "c")  # root reads everything but a link to itself
    else:
        (tmp_path / "c").touch(mode=0)
    code, _, err = stagetrace("floor", "--model", "c", "--gpu", "H100")
    assert code == 2 and err.count("\n") == 1 and "c: " in err
