"""Hugging Face PEFT adapters: `adapter_config.json` with `adapter_model.safetensors`, or else `adapter_model.bin`.

They hold weights alone. Config and tensors must agree: `r` and every pair's rank, `target_modules` and the tensors'
names. Settings that change what the tensors mean, or add others, are refused by name when they are set, and so are
settings this module does not know. An adapter of the output layer is `base_model.model.lm_head.lora_A|B.weight`, at the
true vocabulary size; adapters of the embedding are refused, and so are whole weights beside the pairs, which `peft`
adds where the output layer is a target unless it saves with `save_embedding_layers=False`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from trainer_cell.checkpoint.formats.errors import Incompatible, SourceDamaged, told
from trainer_cell.checkpoint.formats.foreign import Counters, Foreign, Tensors, assembled, features_of, spec_of
from trainer_cell.checkpoint.formats.source import Source
from trainer_cell.training.adapter_names import TARGETS, kind_of
from trainer_cell.training.model_shape import ModelShape

CONFIG = "adapter_config.json"
SAFETENSORS = "adapter_model.safetensors"
PICKLED = "adapter_model.bin"

# What these say does not change what the tensors mean to this trainer.
_HARMLESS = {
    *("r", "lora_alpha", "target_modules", "base_model_name_or_path", "revision", "inference_mode", "peft_version"),
    *("auto_mapping", "lora_dropout", "megatron_core", "qalora_group_size", "runtime_config", "loftq_config"),
    *("eva_config",),
}
# Only these values are known to mean what is computed here; the others begin from changed base weights.
_ALLOWED: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none", None),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal", None),
}
_NAME = re.compile(r"base_model\.model\.(.+)\.lora_(A|B)\.weight")


def read_peft(source: Source, shape: ModelShape, alpha: float | None) -> Foreign:
    """Raises `FormatRefused`, naming the file, tensor or field."""
    config = source.read_json(CONFIG)
    _check_settings(config)
    rank, alpha = _number(config, "r"), _alpha(config, alpha)
    if rank != int(rank):
        raise Incompatible(f"{CONFIG}: r is {rank}")
    weights = _tensors(source)
    modules = _modules(weights, int(rank))
    features = features_of(shape)
    _check_targets(config.get("target_modules"), modules, features)
    remarks = ["lora_dropout is not used in training here"] if config.get("lora_dropout") else []
    spec = spec_of({kind_of(module) for module in modules}, int(rank), alpha)
    return assembled(spec, features, {"weight": weights}, Counters(), remarks)


def _check_settings(config: Mapping[str, Any]) -> None:
    for field, value in config.items():
        if field in _ALLOWED:
            if value not in _ALLOWED[field]:
                raise Incompatible(f"{CONFIG}: {field} is {value!r}, which is not supported")
        elif value and field not in _HARMLESS:
            raise Incompatible(f"{CONFIG}: {field} is set, which is not supported")
    if config.get("peft_type") is None:
        raise Incompatible(f"{CONFIG}: peft_type is missing")


def _number(config: Mapping[str, Any], field: str) -> float:
    value = config.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise Incompatible(f"{CONFIG}: {field} is {value!r}, not a positive number")
    return value


def _alpha(config: Mapping[str, Any], given: float | None) -> float:
    alpha = float(_number(config, "lora_alpha"))
    if given is not None and given != alpha:
        raise Incompatible(f"{CONFIG}: lora_alpha is {alpha}, --alpha says {given}")
    return alpha


def _tensors(source: Source) -> Tensors:
    if SAFETENSORS in source.names:
        try:
            tensors: Any = load_file(source.file(SAFETENSORS))
        except (SafetensorError, ValueError, OSError) as error:
            raise SourceDamaged(f"{SAFETENSORS}: cannot be read: {error}") from error
        file = SAFETENSORS
    elif PICKLED in source.names:
        tensors, file = source.read_torch(PICKLED), PICKLED
    else:
        raise SourceDamaged(f"{SAFETENSORS}: the file is missing, and so is {PICKLED}")
    if not isinstance(tensors, dict) or not tensors:
        raise SourceDamaged(f"{file}: holds no tensors by name")
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise SourceDamaged(f"{file}: {name!r} is no tensor")
    return tensors


def _modules(weights: Mapping[str, torch.Tensor], rank: int) -> set[str]:
    """The modules the tensors are of; raises `Incompatible` for other names, and for a pair of another rank."""
    modules = set()
    for name, tensor in weights.items():
        match = _NAME.fullmatch(name)
        if match is None and ".base_layer." in name:
            raise Incompatible(f"{name}: a copy of the base model's; save the adapter with save_embedding_layers=False")
        if match is None:
            raise Incompatible(f"{name}: no tensor of an adapter that is supported")
        own = tensor.size(0 if match[2] == "A" else 1) if tensor.dim() == 2 else None
        if own != rank:
            raise Incompatible(f"{name}: has shape {list(tensor.shape)}, while r is {rank} in {CONFIG}")
        modules.add(match[1])
    return modules


def _check_targets(targets: Any, modules: Iterable[str], features: Iterable[str]) -> None:
    """What the config means among the base model's modules must be what the tensors are of, both ways."""
    if targets == "all-linear":
        meant = {module for module in features if kind_of(module) not in TARGETS["train_unembed"]}
    elif isinstance(targets, str):
        try:
            meant = {module for module in features if re.fullmatch(targets, module)}
        except re.error as error:
            raise Incompatible(f"{CONFIG}: target_modules is no pattern: {error}") from error
    elif isinstance(targets, list) and targets and all(isinstance(target, str) for target in targets):
        meant = {m for m in features for target in targets if m == target or m.endswith(f".{target}")}
    else:
        raise Incompatible(f"{CONFIG}: target_modules is {targets!r}, not a list of names or a pattern")
    if foreign := sorted(set(modules) - set(features)):
        raise Incompatible(f"{told(foreign)}: the base model has no such modules; the adapter is of another one")
    missing, surplus = sorted(meant - set(modules)), sorted(set(modules) - meant)
    if missing:
        raise SourceDamaged(f"missing tensors: target_modules in {CONFIG} means {told(missing)} too")
    if surplus:
        raise Incompatible(f"{CONFIG}: target_modules does not mean {told(surplus)}, which there are tensors of")
