"""`cellgate/tiny`: a random Llama-shaped model for tests, the same bytes on every machine, with a byte tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

NAME = "cellgate/tiny"

_SEED = 20_260_101
_SPREAD = 0.2  # standard deviation of the weights: wide enough for logits that differ
_HIDDEN, _LAYERS, _HEADS, _KV_HEADS, _MLP_WIDTH, _VOCAB = 64, 4, 8, 4, 160, 512
_HEAD_DIM = _HIDDEN // _HEADS

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": _HIDDEN,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _KV_HEADS,
    "head_dim": _HEAD_DIM,
    "intermediate_size": _MLP_WIDTH,
    "vocab_size": _VOCAB,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "torch_dtype": "float32",
}


def write(directory: Path) -> None:
    """Fill an empty directory with config, weights and tokenizer."""
    save_file(_weights(), directory / "model.safetensors", metadata={"format": "pt"})
    _write_json(directory / "config.json", CONFIG)
    _write_json(directory / "tokenizer.json", _tokenizer())
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": CONFIG["max_position_embeddings"],
    }
    _write_json(directory / "tokenizer_config.json", tokenizer_config)


def _weights() -> dict[str, npt.NDArray[np.float32]]:
    # The legacy generator's uniform stream is frozen and needs no libm, so the bytes do not depend on the machine.
    random = np.random.RandomState(_SEED)
    reach = _SPREAD * 3**0.5

    def matrix(rows: int, columns: int) -> npt.NDArray[np.float32]:
        return ((random.random_sample((rows, columns)) * 2 - 1) * reach).astype(np.float32)

    def norm() -> npt.NDArray[np.float32]:
        return (0.5 + random.random_sample(_HIDDEN)).astype(np.float32)

    weights = {"model.embed_tokens.weight": matrix(_VOCAB, _HIDDEN)}
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}."
        weights |= {
            f"{prefix}self_attn.q_proj.weight": matrix(_HEADS * _HEAD_DIM, _HIDDEN),
            f"{prefix}self_attn.k_proj.weight": matrix(_KV_HEADS * _HEAD_DIM, _HIDDEN),
            f"{prefix}self_attn.v_proj.weight": matrix(_KV_HEADS * _HEAD_DIM, _HIDDEN),
            f"{prefix}self_attn.o_proj.weight": matrix(_HIDDEN, _HEADS * _HEAD_DIM),
            f"{prefix}mlp.gate_proj.weight": matrix(_MLP_WIDTH, _HIDDEN),
            f"{prefix}mlp.up_proj.weight": matrix(_MLP_WIDTH, _HIDDEN),
            f"{prefix}mlp.down_proj.weight": matrix(_HIDDEN, _MLP_WIDTH),
            f"{prefix}input_layernorm.weight": norm(),
            f"{prefix}post_attention_layernorm.weight": norm(),
        }
    return weights | {"model.norm.weight": norm(), "lm_head.weight": matrix(_VOCAB, _HIDDEN)}


def _tokenizer() -> dict[str, Any]:
    """One token for each byte, two special ones, and unused ones up to the vocabulary's size."""
    vocab = {character: byte for byte, character in enumerate(_byte_characters())}
    special = ["<s>", "</s>", *(f"<unused{number}>" for number in range(_VOCAB - 258))]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": 256 + number,
                "content": content,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for number, content in enumerate(special)
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": [], "unk_token": None, "byte_fallback": False},
    }


def _byte_characters() -> list[str]:
    """The printable stand-in that byte-level tokenizers use for each byte, by byte."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
