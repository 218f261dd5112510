"""`python -m trainer_cell.training.megatron_weights SOURCE BASE INTO`: base weights of Megatron's as Hugging Face's.

SOURCE holds what `megatron.core.dist_checkpointing` saved of a GPTModel in its form `torch_dist`, whatever the layout
was; its optimizer is not read. BASE is a prepared base model of the same shape, of which INTO gets the config and the
tokenizer. Megatron's form is pickled in part: only directories that are trusted are to be read.
"""

from __future__ import annotations

import pickle
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import load
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.serialization import load_tensors_metadata
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException

from trainer_cell.training import cpu_device
from trainer_cell.training.model_shape import ModelShape, read_shape
from trainer_cell.training.safetensors_files import DamagedBase

# What a base directory holds besides weights and what tells of them.
_BESIDES = ("*.json", "*.jinja", "*.txt", "*.model")
_NOT_TAKEN = ("cellgate_base.json", "model.safetensors.index.json")
_OF_THE_MODEL = ("embedding.", "decoder.", "output_layer.")
_LAYERS = "decoder.layers."
# Of a vocabulary, in rows; Megatron pads it to a multiple of 128 times the tensor-parallel ranks.
_LARGEST_PADDING = 128 * 64

# All that a broken checkpoint has been seen to raise; torch's own derives from BaseException.
_UNREADABLE = (
    CheckpointException,
    CheckpointingException,
    OSError,
    RuntimeError,
    ValueError,
    AttributeError,
    KeyError,
    EOFError,
    pickle.UnpicklingError,
)


class _Stored:
    """The model's tensors of a checkpoint, whole, by Megatron's names; knows in the end which nobody asked for."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._used: set[str] = set()

    @classmethod
    def read(cls, source: Path) -> _Stored:
        """Raises `DamagedBase`."""
        try:
            wanted = {
                key: tensor
                for key, tensor in load_tensors_metadata(str(source)).items()
                if key.startswith(_OF_THE_MODEL) and "_extra_state" not in key
            }
            loaded = load(dict(wanted), str(source), validate_access_integrity=False)
            return cls({key: loaded[key] for key in wanted})
        except _UNREADABLE as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise DamagedBase(f"{source} cannot be read as a torch_dist checkpoint: {reason[0]}") from error

    def take(self, names: Sequence[str], shape: tuple[int, ...], rows: int | None = None) -> torch.Tensor:
        """The first of `names` that is there; of more rows than `rows` the first ones: the others are padding."""
        name = next((name for name in names if name in self._tensors), None)
        if name is None:
            raise DamagedBase(f"{' or '.join(names)} is missing")
        self._used.add(name)
        return self._checked(name, self._tensors[name], shape, rows)

    def of_layer(self, names: Sequence[str], layer: int, num_layers: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Layers that are alike lie in one tensor, one after the other; others each in its own."""
        for name in names:
            stacked = self._tensors.get(f"{_LAYERS}{name}")
            if stacked is not None:
                self._used.add(f"{_LAYERS}{name}")
                return self._checked(f"{_LAYERS}{name}", stacked, (num_layers, *shape))[layer]
        return self.take([f"{_LAYERS}{layer}.{name}" for name in names], shape)

    def _checked(
        self, name: str, tensor: torch.Tensor, shape: tuple[int, ...], rows: int | None = None
    ) -> torch.Tensor:
        is_padded = rows is not None and rows < len(tensor) <= rows + _LARGEST_PADDING
        kept = tensor[:rows] if is_padded else tensor
        if tuple(kept.shape) != shape:
            raise DamagedBase(f"{name} has shape {list(tensor.shape)}, expected {list(shape)}")
        return kept

    def is_absent_or(self, name: str, expected: torch.Tensor) -> bool:
        """Whether there is no such tensor, or a second copy of `expected`, padded as it may be."""
        if name not in self._tensors:
            return True
        return bool(torch.equal(self.take([name], tuple(expected.shape), len(expected)), expected))

    def refuse_unused(self) -> None:
        for name in sorted(self._tensors.keys() - self._used):
            raise DamagedBase(f"{name} has no place in this model")


def to_hugging_face(tensors: dict[str, torch.Tensor], shape: ModelShape) -> dict[str, torch.Tensor]:
    """Whole tensors of a GPTModel by Megatron's names -> by Hugging Face's, their dtypes as they are.

    Raises `DamagedBase` for a tensor that is missing, of another shape, or has no place in the model.
    """
    return _converted(_Stored(tensors), shape)


def _converted(stored: _Stored, shape: ModelShape) -> dict[str, torch.Tensor]:
    rows = (shape.vocab, shape.hidden)
    named = {
        "model.embed_tokens.weight": stored.take(["embedding.word_embeddings.weight"], rows, shape.vocab),
        "model.norm.weight": stored.take(["decoder.final_layernorm.weight"], (shape.hidden,)),
    }
    if not shape.tied:
        named["lm_head.weight"] = stored.take(["output_layer.weight"], rows, shape.vocab)
    elif not stored.is_absent_or("output_layer.weight", named["model.embed_tokens.weight"]):
        raise DamagedBase("output_layer.weight is not the embedding, as it must be in this model")
    for layer in range(shape.num_layers):
        named |= {f"model.layers.{layer}.{name}": tensor for name, tensor in _layer(stored, shape, layer).items()}
    stored.refuse_unused()
    return {name: tensor.contiguous() for name, tensor in named.items()}


def _layer(stored: _Stored, shape: ModelShape, layer: int) -> dict[str, torch.Tensor]:
    def take(size: tuple[int, ...], *names: str) -> torch.Tensor:
        return stored.of_layer(names, layer, shape.num_layers, size)

    query_size, kv_size = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    fused = query_size + 2 * kv_size
    hidden = (shape.hidden,)
    gate_up = take((2 * shape.mlp_width, shape.hidden), "mlp.linear_fc1.weight")
    named = {
        "input_layernorm.weight": take(hidden, "self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
        "post_attention_layernorm.weight": take(hidden, "mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
        "self_attn.o_proj.weight": take((shape.hidden, query_size), "self_attention.linear_proj.weight"),
        "mlp.gate_proj.weight": gate_up[: shape.mlp_width],
        "mlp.up_proj.weight": gate_up[shape.mlp_width :],
        "mlp.down_proj.weight": take((shape.hidden, shape.mlp_width), "mlp.linear_fc2.weight"),
    }
    weight = take((fused, shape.hidden), "self_attention.linear_qkv.weight")
    named |= {f"self_attn.{kind}_proj.weight": part for kind, part in zip("qkv", _apart(weight, shape), strict=True)}
    if shape.qkv_bias:
        bias = take((fused,), "self_attention.linear_qkv.bias")
        named |= {f"self_attn.{kind}_proj.bias": part for kind, part in zip("qkv", _apart(bias, shape), strict=True)}
    if shape.qk_norm:
        for kind in "qk":
            named[f"self_attn.{kind}_norm.weight"] = take((shape.head_dim,), f"self_attention.{kind}_layernorm.weight")
    return named


def _apart(fused: torch.Tensor, shape: ModelShape) -> list[torch.Tensor]:
    """q, k and v out of Megatron's order: for each KV group in turn, its query heads, its key and its value."""
    sizes = [shape.heads // shape.kv_heads * shape.head_dim, shape.head_dim, shape.head_dim]
    return [part.flatten(0, 1) for part in fused.unflatten(0, (shape.kv_heads, -1)).split(sizes, 1)]


def convert(source: Path, base: Path, into: Path) -> None:
    """Fill an empty directory. Raises `DamagedBase` or `UnsupportedBase`."""
    cpu_device.install()
    shape = read_shape(base)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    named = _converted(_Stored.read(source), shape)
    dist.destroy_process_group()
    for pattern in _BESIDES:
        for file in base.glob(pattern):
            if file.name not in _NOT_TAKEN:
                shutil.copy(file, into / file.name)
    save_file(named, into / "model.safetensors", metadata={"format": "pt"})


def main(arguments: list[str]) -> int:
    try:
        convert(*(Path(argument) for argument in arguments))
    except (DamagedBase, ValueError, OSError) as problem:
        sys.stderr.write(f"{problem}\n")
        return 1
    return 0


if __name__ == "__main__":
    from trainer_cell.watchdog import die_with_parent

    die_with_parent()
    sys.exit(main(sys.argv[1:]))
