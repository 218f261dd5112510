"""What a Hugging Face `config.json` says of a base model, and which base models this cell can carry."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer_cell.training.rope import Rope, read_rope

FAMILIES = ("llama", "qwen2", "qwen3")


class UnsupportedBase(ValueError):
    """The base model, or the layout asked of it, is not one this cell can carry; the message says why."""


@dataclass(frozen=True)
class ModelShape:
    """A dense decoder of the Llama kind; sizes are global, in elements.

    qkv_bias: q, k and v projections have biases (Qwen2); qk_norm: queries and keys are normalised per head (Qwen3).
    """

    family: str
    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    vocab: int
    max_positions: int
    norm_eps: float
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    rope: Rope


def read_shape(directory: Path) -> ModelShape:
    """Raises `UnsupportedBase` for anything that would be computed wrongly."""
    try:
        config = json.loads((directory / "config.json").read_text())
    except FileNotFoundError as error:
        raise UnsupportedBase(f"{directory}: there is no config.json") from error
    return shape_from_config(config)


def shape_from_config(config: Mapping[str, Any]) -> ModelShape:
    family = config.get("model_type")
    if family not in FAMILIES:
        raise UnsupportedBase(f"model_type {family!r} is not one of {', '.join(FAMILIES)}")
    _refuse_what_is_not_computed(config)
    try:
        return _shape(family, config)
    except KeyError as error:
        raise UnsupportedBase(f"config.json has no {error.args[0]}") from error


def _shape(family: str, config: Mapping[str, Any]) -> ModelShape:
    heads = int(config["num_attention_heads"])
    hidden = int(config["hidden_size"])
    return ModelShape(
        family=family,
        num_layers=int(config["num_hidden_layers"]),
        hidden=hidden,
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=_head_dim(config, hidden, heads),
        mlp_width=int(config["intermediate_size"]),
        vocab=int(config["vocab_size"]),
        max_positions=int(config["max_position_embeddings"]),
        norm_eps=float(config["rms_norm_eps"]),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        rope=_rope(config),
    )


def _head_dim(config: Mapping[str, Any], hidden: int, heads: int) -> int:
    if config.get("head_dim"):
        return int(config["head_dim"])
    if config["model_type"] == "qwen3":
        return 128  # what the architecture means when its config is silent
    if hidden % heads:
        raise UnsupportedBase(f"hidden_size {hidden} does not divide by {heads} heads, and there is no head_dim")
    return hidden // heads


def _rope(config: Mapping[str, Any]) -> Rope:
    try:
        return read_rope(config)
    except ValueError as error:
        raise UnsupportedBase(str(error)) from error


def _refuse_what_is_not_computed(config: Mapping[str, Any]) -> None:
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedBase(f"hidden_act {config['hidden_act']!r}: only silu is computed")
    for switch in ("attention_bias", "mlp_bias", "use_sliding_window", "quantization_config"):
        if config.get(switch):
            raise UnsupportedBase(f"{switch} is set, which is not computed")
    if any(kind != "full_attention" for kind in config.get("layer_types") or ()):
        raise UnsupportedBase("layer_types holds other than full_attention, which is not computed")


def check_layout(shape: ModelShape, tensor: int, pipeline: int) -> None:
    """Raises `UnsupportedBase` if the model cannot be cut this way, with every reason why."""
    sizes = {"heads": shape.heads, "KV heads": shape.kv_heads, "MLP columns": shape.mlp_width}
    uneven = [f"{size} {what}" for what, size in sizes.items() if size % tensor]
    reasons = [f"{' and '.join(uneven)} cannot be split over {tensor} tensor-parallel ranks"] if uneven else []
    if shape.num_layers % pipeline:
        reasons.append(f"{shape.num_layers} layers cannot be split over {pipeline} pipeline stages")
    if reasons:
        raise UnsupportedBase(f"this base model cannot have this layout: {'; '.join(reasons)}")
