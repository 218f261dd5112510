"""Hugging Face safetensors into a Megatron GPTModel; each rank reads only the rows and columns it holds."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.nn.functional import pad

from trainer_cell.protocol.outcomes import Layout
from trainer_cell.training.model_shape import ModelShape
from trainer_cell.training.output_head import OutputHead
from trainer_cell.training.projections import Adapted, Projection, fuse
from trainer_cell.training.safetensors_files import DamagedBase, StoredTensor, index_tensors

_EMBEDDING = "model.embed_tokens"
_HEAD = "lm_head"


class _Source:
    """Parts of the stored tensors; knows in the end which nobody asked for."""

    def __init__(self, directory: Path, open_files: ExitStack) -> None:
        self._tensors: dict[str, StoredTensor] = index_tensors(directory)
        self._files = {
            file: open_files.enter_context(safe_open(file, framework="pt"))
            for file in {tensor.file for tensor in self._tensors.values()}
        }
        self._used: set[str] = set()

    def part(self, name: str, shape: tuple[int, ...], axis: int = 0, offset: int = 0, size: int | None = None) -> Any:
        """`size` rows (axis 0) or columns (axis 1) from `offset`, of a tensor that must have the global `shape`."""
        stored = self._tensors.get(name)
        if stored is None:
            raise DamagedBase(f"{name} is missing")
        if stored.shape != shape:
            raise DamagedBase(f"{name} has shape {list(stored.shape)}, expected {list(shape)}")
        self._used.add(name)
        rows = self._files[stored.file].get_slice(name)
        end = shape[axis] if size is None else offset + size
        return rows[offset:end] if axis == 0 else rows[:, offset:end]

    def weight(self, projection: Projection) -> Any:
        shape = (projection.out_features, projection.in_features)
        return self.part(f"{projection.name}.weight", shape, projection.axis, projection.offset, projection.size)

    def bias(self, projection: Projection) -> Any:
        shape = (projection.out_features,)
        return self.part(f"{projection.name}.bias", shape, 0, projection.offset, projection.size)

    def refuse_unused(self, others: Iterable[str]) -> None:
        """Raises `DamagedBase` for a tensor that is neither used nor expected on another pipeline stage."""
        expected = self._used | set(others)
        for name in sorted(self._tensors.keys() - expected):
            if not name.endswith("rotary_emb.inv_freq"):  # a buffer that old exports hold
                raise DamagedBase(f"{name} has no place in this model")


class _Placement:
    """Copies tensors into the model's parameters and freezes them; knows in the end which got nothing."""

    def __init__(self) -> None:
        self._placed: set[Any] = set()

    def put(self, parameter: Any, value: torch.Tensor) -> None:
        assert parameter.shape == value.shape, (parameter.shape, value.shape)
        parameter.data.copy_(value)
        parameter.requires_grad_(False)
        self._placed.add(parameter)

    def check_complete(self, model: Any) -> None:
        left = [name for name, parameter in model.named_parameters() if parameter not in self._placed]
        assert not left, f"no weights were read for {left}"


def load_weights(model: Any, directory: Path, shape: ModelShape, layout: Layout, tensor_rank: int) -> None:
    """Fill `model`, whose linear layers are `Adapted`, and tell them their projections. Raises `DamagedBase`."""
    with ExitStack() as open_files:
        source, placement = _Source(directory, open_files), _Placement()
        cut = _Cut(shape, layout.tensor, tensor_rank)
        for layer in model.decoder.layers:
            _load_layer(layer, source, placement, cut)
        if model.pre_process:
            placement.put(model.embedding.word_embeddings.weight, _padded(source, cut, _EMBEDDING))
        if model.post_process:
            _load_output(model, source, placement, cut)
        placement.check_complete(model)
        source.refuse_unused(_stage_names(shape))


class _Cut:
    """This tensor-parallel rank's part of each projection."""

    def __init__(self, shape: ModelShape, tensor: int, tensor_rank: int) -> None:
        self.shape, self._tensor, self._rank = shape, tensor, tensor_rank
        self.kv_heads = shape.kv_heads // tensor
        self.vocab_rows = -(-shape.vocab // tensor)

    def rows(self, name: str, out_features: int) -> Projection:
        size = out_features // self._tensor
        return Projection(name, out_features, self.shape.hidden, 0, self._rank * size, size)

    def columns(self, name: str, in_features: int) -> Projection:
        size = in_features // self._tensor
        return Projection(name, self.shape.hidden, in_features, 1, self._rank * size, size)

    def vocabulary(self, name: str) -> Projection:
        """The true rows among this rank's `vocab_rows`."""
        offset = min(self._rank * self.vocab_rows, self.shape.vocab)
        size = min(self.vocab_rows, self.shape.vocab - offset)
        return Projection(name, self.shape.vocab, self.shape.hidden, 0, offset, size)


def _load_layer(layer: Any, source: _Source, placement: _Placement, cut: _Cut) -> None:
    shape, prefix = cut.shape, f"model.layers.{layer.layer_number - 1}."
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    query_size, kv_size = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    qkv = (
        cut.rows(f"{attention}q_proj", query_size),
        cut.rows(f"{attention}k_proj", kv_size),
        cut.rows(f"{attention}v_proj", kv_size),
    )
    gate_up = (cut.rows(f"{mlp}gate_proj", shape.mlp_width), cut.rows(f"{mlp}up_proj", shape.mlp_width))
    _load_linear(layer.self_attention.linear_qkv, qkv, source, placement, groups=cut.kv_heads)
    _load_linear(layer.self_attention.linear_proj, (cut.columns(f"{attention}o_proj", query_size),), source, placement)
    _load_linear(layer.mlp.linear_fc1, gate_up, source, placement)
    _load_linear(layer.mlp.linear_fc2, (cut.columns(f"{mlp}down_proj", shape.mlp_width),), source, placement)
    norms = {
        "input_layernorm": (layer.input_layernorm, shape.hidden),
        "post_attention_layernorm": (layer.pre_mlp_layernorm, shape.hidden),
    }
    if shape.qk_norm:
        norms["self_attn.q_norm"] = (layer.self_attention.q_layernorm, shape.head_dim)
        norms["self_attn.k_norm"] = (layer.self_attention.k_layernorm, shape.head_dim)
    for name, (norm, size) in norms.items():
        placement.put(norm.weight, source.part(f"{prefix}{name}.weight", (size,)))


def _load_linear(
    linear: Adapted, projections: tuple[Projection, ...], source: _Source, placement: _Placement, groups: int = 1
) -> None:
    linear.projections, linear.groups = projections, groups
    parts = [source.weight(projection) for projection in projections]
    placement.put(linear.weight, fuse(parts, groups, 0) if len(parts) > 1 else parts[0])  # type: ignore[attr-defined]
    if getattr(linear, "bias", None) is not None:
        biases = [source.bias(projection) for projection in projections]
        placement.put(linear.bias, fuse(biases, groups, 0))  # type: ignore[attr-defined]


def _load_output(model: Any, source: _Source, placement: _Placement, cut: _Cut) -> None:
    """The final norm, and the output layer in place of Megatron's."""
    placement.put(model.decoder.final_layernorm.weight, source.part("model.norm.weight", (cut.shape.hidden,)))
    own = model.output_layer.weight
    head = OutputHead(model.embedding.word_embeddings.weight if own is None else own)
    if own is not None:
        placement.put(own, _padded(source, cut, _EMBEDDING if cut.shape.tied else _HEAD))
    head.projections = (cut.vocabulary(_HEAD),)
    model.output_layer = head


def _padded(source: _Source, cut: _Cut, name: str) -> Any:
    """This rank's vocabulary rows, zeros beyond the true vocabulary."""
    projection = cut.vocabulary(name)
    return pad(source.weight(projection), (0, 0, 0, cut.vocab_rows - projection.size))


def _stage_names(shape: ModelShape) -> set[str]:
    """Every name a stage of this model may read, and the tied output layer some files store again."""
    names = {f"{_EMBEDDING}.weight", f"{_HEAD}.weight", "model.norm.weight"}
    inner = ["input_layernorm", "post_attention_layernorm"]
    inner += [f"self_attn.{kind}_proj" for kind in "qkvo"] + [f"mlp.{kind}_proj" for kind in ("gate", "up", "down")]
    inner += ["self_attn.q_norm", "self_attn.k_norm"] if shape.qk_norm else []
    names |= {f"model.layers.{layer}.{name}.weight" for layer in range(shape.num_layers) for name in inner}
    if shape.qkv_bias:
        names |= {
            f"model.layers.{layer}.self_attn.{kind}_proj.bias" for layer in range(shape.num_layers) for kind in "qkv"
        }
    return names
