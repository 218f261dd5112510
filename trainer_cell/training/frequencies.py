"""Inverse frequencies of the rotary position embedding, computed as transformers computes them, bit for bit."""

from __future__ import annotations

import math

import torch

from trainer_cell.training.rope import Llama3Scaling, Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """float32 [head_dim / 2], on the CPU."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(dtype=torch.float32) / head_dim
    plain = 1.0 / (rope.theta**exponents)
    return plain if rope.scaling is None else _stretched(plain, rope.scaling)


def _stretched(plain: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    longest_kept = scaling.original_positions / scaling.high_freq_factor
    shortest_stretched = scaling.original_positions / scaling.low_freq_factor
    wavelengths = 2 * math.pi / plain
    stretched = torch.where(wavelengths > shortest_stretched, plain / scaling.factor, plain)
    ramp = (scaling.original_positions / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    between = (1 - ramp) * stretched / scaling.factor + ramp * stretched
    is_between = ~(wavelengths < longest_kept) * ~(wavelengths > shortest_stretched)
    return torch.where(is_between, between, stretched)
