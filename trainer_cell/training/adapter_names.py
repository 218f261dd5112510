"""What an adapter's tensors are called, and which projections its switches stand for. Needs no torch."""

from __future__ import annotations

from trainer_cell.protocol.commands import AdapterSpec

TARGETS = {
    "train_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "train_mlp": ("gate_proj", "up_proj", "down_proj"),
    "train_unembed": ("lm_head",),
}


def target_modules(spec: AdapterSpec) -> tuple[str, ...]:
    """The kinds of projection an adapter of this shape acts on, in PEFT's words."""
    return tuple(kind for switch, kinds in TARGETS.items() if getattr(spec, switch) for kind in kinds)


def kind_of(projection: str) -> str:
    """`q_proj` of `model.layers.0.self_attn.q_proj`."""
    return projection.rsplit(".", 1)[-1]


def pair_names(projection: str) -> tuple[str, str]:
    """What PEFT calls the two tensors of a projection."""
    prefix = f"base_model.model.{projection}"
    return f"{prefix}.lora_A.weight", f"{prefix}.lora_B.weight"
