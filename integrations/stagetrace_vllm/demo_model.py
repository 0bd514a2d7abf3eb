"""A tiny random Llama, made on the spot: real engine code runs on it, on any machine, without a download.

The files are written directly, not through transformers: importing that takes longer than all the rest, and
plain files mean the same model whichever version the engine brings along.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

from .demo_text import WORDS, sentences, training_text

#: Raised whenever the files change, so that a model kept from an older version is made anew.
FORMAT = 1
MARKER = "stagetrace-demo.json"

VOCABULARY = 1024
HIDDEN = 128
HEAD = 64  # the CPU attention kernels want 64
HEADS = 2
KV_HEADS = 1
INTERMEDIATE = 256
LAYERS = 2
POSITIONS = 4096
SEED = 20

UNKNOWN, END, USER, ASSISTANT, SYSTEM = "<unk>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"
SPECIAL = (UNKNOWN, END, USER, ASSISTANT, SYSTEM)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
#: What the template adds to one user message: the role mark, the end mark, the mark that asks for an answer.
TEMPLATE_TOKENS = 3


def make_model(path: Path) -> Path:
    """Write the model to ``path`` unless it is there already, and return ``path``.

    The directory appears complete or not at all. One that holds something else is refused, never overwritten.
    """
    if is_complete(path):
        return path
    stale = (path / MARKER).is_file()
    if path.exists() and not stale and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(f"{path}: exists and is not a demo model; name another place or remove it")
    path.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        made = work / "model"
        made.mkdir()
        _write(made)
        if stale:
            os.rename(path, work / "stale")
        os.rename(made, path)
    except OSError:
        if not is_complete(path):  # otherwise another process was faster, and its model is the same
            raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return path


def is_complete(path: Path) -> bool:
    """Tell whether ``path`` holds a demo model of this format."""
    try:
        marker = json.loads((path / MARKER).read_text())
    except (OSError, ValueError):
        return False
    return isinstance(marker, dict) and marker.get("format") == FORMAT


def prompt_of(tokenizer_dir: Path, tokens: int, seed: int) -> str:
    """Return English whose chat prompt (one user message) has ``tokens`` tokens. Needs only `tokenizers`.

    The same seed gives the same text; two seeds differ from the first token on, so they
    share no cached block.
    """
    tokenizer = import_module("tokenizers").Tokenizer.from_file(str(Path(tokenizer_dir) / "tokenizer.json"))

    def length(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    wanted = max(1, tokens - TEMPLATE_TOKENS)
    chance = random.Random(seed)
    pieces = sentences()
    text = f"{seed % 10**6:06d}"[::-1][:wanted]  # a digit is a token
    used = length(text)
    while used < wanted:  # words never merge across a space, so lengths add up
        sentence = " " + chance.choice(pieces)
        used += length(sentence)
        text += sentence
    while length(text) > wanted and " " in text:
        text = text.rsplit(" ", 1)[0]
    filler = next(f" {word}" for word in WORDS if length(f" {word}") == 1)
    return text + filler * (wanted - length(text))


def _write(path: Path) -> None:
    tokenizer = _tokenizer()
    tokenizer.save(str(path / "tokenizer.json"))
    ids = {name: tokenizer.token_to_id(name) for name in SPECIAL}
    _write_json(path / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "unk_token": UNKNOWN,
        "model_max_length": POSITIONS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    })  # fmt: skip
    _write_json(path / "config.json", _config(ids[END]))
    _write_json(path / "generation_config.json", {"eos_token_id": ids[END], "do_sample": False})
    import_module("safetensors.numpy").save_file(
        _weights(sorted(ids.values())), str(path / "model.safetensors"), metadata={"format": "pt"}
    )
    _write_json(path / MARKER, {"format": FORMAT})


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _tokenizer() -> Any:
    """Train a byte-level BPE on printable ASCII only: then nearly every id is complete text by itself."""
    lib = import_module("tokenizers")
    tokenizer = lib.Tokenizer(lib.models.BPE(unk_token=UNKNOWN, fuse_unk=True))
    tokenizer.pre_tokenizer = lib.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = lib.decoders.ByteLevel()
    # The last four are byte-level's names for space, newline, tab and carriage return.
    alphabet = [chr(code) for code in range(33, 127)] + ["\u0120", "\u010a", "\u0109", "\u010d"]
    trainer = lib.trainers.BpeTrainer(
        vocab_size=VOCABULARY, min_frequency=1, special_tokens=list(SPECIAL), initial_alphabet=alphabet,
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(training_text(), trainer)
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise RuntimeError(f"the demo tokenizer has {tokenizer.get_vocab_size()} entries, not {VOCABULARY}")
    return tokenizer


def _config(end: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": POSITIONS,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": end,
        "torch_dtype": "float32",
    }


def _weights(special: list[int]) -> dict[str, Any]:
    """Draw the weights. Channel 0 stays constant through all layers; the head uses it to rule out special ids."""
    np = import_module("numpy")
    chance = np.random.default_rng(SEED)

    def normal(rows: int, columns: int, gain: float) -> Any:
        return (chance.standard_normal((rows, columns)) * gain / columns**0.5).astype(np.float32)

    def ones() -> Any:
        return np.ones(HIDDEN, dtype=np.float32)

    embedding = normal(VOCABULARY, HIDDEN, HIDDEN**0.5)
    embedding[:, 0] = 1.0
    tensors = {"model.embed_tokens.weight": embedding, "model.norm.weight": ones()}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        tensors[at + "input_layernorm.weight"] = ones()
        tensors[at + "post_attention_layernorm.weight"] = ones()
        tensors[at + "self_attn.q_proj.weight"] = normal(HEADS * HEAD, HIDDEN, 2.0)
        tensors[at + "self_attn.k_proj.weight"] = normal(KV_HEADS * HEAD, HIDDEN, 2.0)
        tensors[at + "self_attn.v_proj.weight"] = normal(KV_HEADS * HEAD, HIDDEN, 2.0)
        tensors[at + "self_attn.o_proj.weight"] = normal(HIDDEN, HEADS * HEAD, 2.0)
        tensors[at + "mlp.gate_proj.weight"] = normal(INTERMEDIATE, HIDDEN, 2.0)
        tensors[at + "mlp.up_proj.weight"] = normal(INTERMEDIATE, HIDDEN, 2.0)
        tensors[at + "mlp.down_proj.weight"] = normal(HIDDEN, INTERMEDIATE, 1.0)
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            tensors[f"{at}{name}.weight"][0] = 0.0
    head = normal(VOCABULARY, HIDDEN, 4.0)
    head[:, 0] = 0.0
    head[special, 0] = -1000.0
    tensors["lm_head.weight"] = head
    return tensors
