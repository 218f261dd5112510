"""Core attention over packed sequences: one call of scaled dot product attention for each sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch.nn.functional import scaled_dot_product_attention


@dataclass
class PackedLengths(PackedSeqParams):  # type: ignore[misc]
    """Megatron's description of a packed row, and the lengths as plain numbers, so that no layer waits for a device."""

    lengths: tuple[int, ...] = ()


def packed(lengths: tuple[int, ...]) -> PackedLengths:
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    longest = max(lengths)
    return PackedLengths(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        lengths=lengths,
    )


class PackedAttention(torch.nn.Module):  # type: ignore[misc]
    """Causal attention; queries [tokens, heads, d], keys and values [tokens, KV heads, d] -> [tokens, heads * d]."""

    def __init__(self, config: Any, softmax_scale: float | None = None, **_kwargs: Any) -> None:
        super().__init__()
        self._scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        packed_seq_params: PackedLengths,
        **_kwargs: Any,
    ) -> torch.Tensor:
        lengths = packed_seq_params.lengths
        sequences = zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)
        return torch.cat([self._attend(*sequence) for sequence in sequences])

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        is_grouped = query.size(1) != key.size(1)
        query, key, value = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value))
        out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=self._scale, enable_gqa=is_grouped)
        return out.squeeze(0).transpose(0, 1).flatten(1)
