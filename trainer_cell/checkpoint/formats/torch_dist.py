"""Megatron's `torch_dist` form of one adapter, read and written with `megatron.core.dist_checkpointing` itself.

Keys are Megatron's names without a slot (`megatron_names`), as `….adapter.linear_in.weight`; layers are numbered, or
the tensor's own first dimension when the name has no number. Of the optimizer's state the keys begin with
`optimizer.state.` and then `fp32_param.` (the master), `exp_avg.` or `exp_avg_sq.`; `chained_<n>.` before it and names
without `optimizer.state.` (and `master.`) are read too. `META.json` tells what the tensors do not:

    base_model, lora_rank, lora_alpha, train_attn, train_mlp, train_unembed       always
    base_digest, dtype, step, iteration, has_optimizer, adam_params, scheduler    in what is written here

and the common state holds `iteration`, `optimizer: {"step": …}` and, where there is a scheduler, `opt_param_scheduler`,
which must not disagree with it. What is written here has a pair for each projection (`adapter_q`, …), whole and in
Hugging Face's order of rows, so that the optimizer's state comes back bit for bit. In checkpoints where one A serves
all of `linear_qkv` or `linear_fc1` the weights map onto such pairs exactly, and the optimizer's state does not.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from trainer_cell.checkpoint.formats.dist_checkpoint import read_dist, sync, write_dist
from trainer_cell.checkpoint.formats.errors import Incompatible, OptimizerDoesNotMap, SourceDamaged
from trainer_cell.checkpoint.formats.foreign import (
    Counters,
    Features,
    Foreign,
    Tensors,
    assembled,
    features_of,
    scheduler_of,
    spec_of,
)
from trainer_cell.checkpoint.formats.fused import Assembly, rank_of
from trainer_cell.checkpoint.formats.megatron_names import megatron_name, parse_all
from trainer_cell.checkpoint.formats.native import refuse_fused
from trainer_cell.checkpoint.formats.source import Source
from trainer_cell.checkpoint.formats.stored import Stored
from trainer_cell.protocol.commands import AdamParams, AdapterSpec
from trainer_cell.training.adapter_names import kind_of
from trainer_cell.training.model_shape import ModelShape
from trainer_cell.vault.manifest import Manifest

META = "META.json"
_STATE = "optimizer.state."
_PARTS = {"fp32_param.": "master", "master.": "master", "exp_avg.": "exp_avg", "exp_avg_sq.": "exp_avg_sq"}
_WRITTEN = {"weight": "", "master": f"{_STATE}fp32_param.", "exp_avg": f"{_STATE}exp_avg."}
_WRITTEN |= {"exp_avg_sq": f"{_STATE}exp_avg_sq."}


def read_torch_dist(
    source: Source, shape: ModelShape, base_digest: str, alpha: float | None, with_optimizer: bool
) -> Foreign:
    """Raises `FormatRefused`, naming the file or tensor."""
    meta = source.read_json(META)
    if meta.get("base_digest") not in (None, base_digest):
        raise Incompatible(f"{META}: base_digest is {meta['base_digest']}, the base model's is {base_digest}")
    tensors, common = read_dist(source)
    return adapter_of(meta, tensors, common, shape, alpha, with_optimizer)


def adapter_of(
    meta: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    common: Mapping[str, Any],
    shape: ModelShape,
    alpha: float | None,
    with_optimizer: bool,
) -> Foreign:
    """What a checkpoint's whole tensors, by key, and its common state are; raises as `read_torch_dist` does."""
    features, by_part = features_of(shape), _by_part(tensors)
    weights = by_part.pop("weight", {})
    places = parse_all(weights)
    rank = rank_of(places, weights)
    parts = {"weight": _whole(weights, shape, features, rank)}
    counters, remarks = _counters(meta, common), []
    if meta.get("has_optimizer") and not by_part:
        raise SourceDamaged(f"missing tensors: {META} tells of an optimizer's state, and there is none")
    if with_optimizer and by_part:
        refuse_fused(places)
        if not {"exp_avg", "exp_avg_sq"} <= by_part.keys():
            raise SourceDamaged("missing tensors: the optimizer's state holds not both of Adam's moments")
        parts |= {part: _whole(of_part, shape, features, rank) for part, of_part in by_part.items()}
    else:
        counters = dataclasses.replace(counters, step=0)
        if with_optimizer:
            remarks.append("there is no optimizer state here: the checkpoint holds the weights alone")
    kinds = {kind_of(name.removesuffix(".lora_A.weight")) for name in parts["weight"] if ".lora_A." in name}
    spec = spec_of(kinds, rank, _alpha(meta, alpha))
    for field, value in _told_by_spec(spec).items():
        if field in meta and meta[field] != value:
            raise Incompatible(f"{META}: {field} is {meta[field]!r}, by the tensors it is {value!r}")
    return assembled(spec, features, parts, counters, remarks)


def _by_part(tensors: Mapping[str, torch.Tensor]) -> dict[str, Tensors]:
    by_part: dict[str, Tensors] = {}
    for key, tensor in tensors.items():
        part, name = _part_of(key)
        by_part.setdefault(part, {})[name] = tensor
    return by_part


def _told_by_spec(spec: AdapterSpec) -> dict[str, Any]:
    return {
        "lora_rank": spec.rank,
        "train_attn": spec.train_attn,
        "train_mlp": spec.train_mlp,
        "train_unembed": spec.train_unembed,
    }


def _part_of(key: str) -> tuple[str, str]:
    """Which part of the state a key is of, and the tensor's name."""
    head, _, rest = key.partition(".")
    name = rest if head.startswith("chained_") and head.removeprefix("chained_").isdecimal() else key
    name = name.removeprefix(_STATE)
    for prefix, part in _PARTS.items():
        if name.startswith(prefix):
            return part, name.removeprefix(prefix)
    return "weight", name


def _whole(tensors: Mapping[str, torch.Tensor], shape: ModelShape, features: Features, rank: int) -> Tensors:
    assembly = Assembly(shape, features, rank)
    for name, place in parse_all(tensors).items():
        tensor = tensors[name]
        if not place.is_stacked:
            assembly.add(name, place, place.layer, [tensor])
            continue
        if tensor.dim() != 3 or tensor.size(0) != shape.num_layers:
            raise Incompatible(
                f"{name}: has shape {list(tensor.shape)}, expected {shape.num_layers} layers of matrices"
            )
        for layer in range(shape.num_layers):
            assembly.add(name, place, layer, [tensor[layer]])
    return assembly.tensors


def _alpha(meta: Mapping[str, Any], given: float | None) -> float:
    stored = meta.get("lora_alpha", given)
    if isinstance(stored, bool) or not isinstance(stored, int | float):
        raise Incompatible(f"{META}: lora_alpha is {meta.get('lora_alpha')!r}, no number; give it with --alpha")
    if given is not None and given != stored:
        raise Incompatible(f"{META}: lora_alpha is {stored}, --alpha says {given}")
    return float(stored)


def _counters(meta: Mapping[str, Any], common: Mapping[str, Any]) -> Counters:
    optimizer = common.get("optimizer")
    step = optimizer.get("step") if isinstance(optimizer, dict) else None
    scheduler = scheduler_of(_same("scheduler", meta.get("scheduler"), common.get("opt_param_scheduler")))
    try:
        adam = msgspec.convert(meta.get("adam_params"), AdamParams | None)
    except msgspec.ValidationError as error:
        raise SourceDamaged(f"{META}: adam_params: {error}") from error
    return Counters(
        _count("step", _same("step", meta.get("step"), step)),
        _count("iteration", _same("iteration", meta.get("iteration"), common.get("iteration"))),
        adam,
        scheduler,
    )


def _same(field: str, of_meta: Any, of_common: Any) -> Any:
    if of_meta is not None and of_common is not None and of_meta != of_common:
        raise SourceDamaged(f"{META}: {field} is {of_meta!r}, in the common state it is {of_common!r}")
    return of_common if of_meta is None else of_meta


def _count(field: str, value: Any) -> int:
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise SourceDamaged(f"{META}: {field} is {value!r}")
    return value


def tensors_of(stored: Stored) -> dict[str, Tensors]:
    """Everything a checkpoint stores: part → PEFT name → whole tensor."""
    parts: dict[str, Tensors] = {}
    for tensor in stored.tensors(weights_only=False):
        dtype = {"F32": torch.float32, "BF16": torch.bfloat16}[tensor.dtype]
        of_part = parts.setdefault(tensor.part, {})
        of_part[tensor.name] = torch.frombuffer(tensor.data, dtype=dtype).view(tensor.shape)
    return parts


def write_torch_dist(directory: Path, manifest: Manifest, parts: Mapping[str, Tensors]) -> None:
    """Into an empty directory, durably. parts: as the checkpoint stores them; in FP32 the weight is the master."""
    if manifest.has_optimizer and "master" not in parts:
        parts = {**parts, "master": parts["weight"]}
    tensors = {
        f"{_WRITTEN[part]}{megatron_name(*_projection_and_half(name))}": tensor
        for part, of_part in parts.items()
        for name, tensor in of_part.items()
    }
    common: dict[str, Any] = {"iteration": manifest.iteration, "optimizer": {"step": manifest.step}}
    if manifest.scheduler is not None:
        common["opt_param_scheduler"] = manifest.scheduler
    write_dist(directory, tensors, common)
    meta = {
        "base_model": manifest.base_model,
        "base_digest": manifest.base_digest,
        "lora_alpha": manifest.adapter.alpha,
        **_told_by_spec(manifest.adapter),
        "dtype": manifest.dtype,
        "step": manifest.step,
        "iteration": manifest.iteration,
        "has_optimizer": manifest.has_optimizer,
        "adam_params": msgspec.to_builtins(manifest.adam_params),
        "scheduler": manifest.scheduler,
    }
    (directory / META).write_text(json.dumps(meta, indent=2) + "\n")
    sync(directory)


def _projection_and_half(name: str) -> tuple[str, str]:
    """Of one of PEFT's names."""
    for half in ("A", "B"):
        if name.endswith(f".lora_{half}.weight"):
            return name.removeprefix("base_model.model.").removesuffix(f".lora_{half}.weight"), half
    raise OptimizerDoesNotMap(name)
