"""A checkpoint of another format as read: whole tensors under PEFT's names, and what an adapter over a base must be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Literal

import torch

from trainer_cell.checkpoint.formats.errors import Incompatible, NonFinite, SourceDamaged, told
from trainer_cell.checkpoint.plan import part_dtype, stored_parts
from trainer_cell.protocol.commands import AdamParams, AdapterSpec
from trainer_cell.protocol.errors import CommandFailed
from trainer_cell.training.adapter_names import TARGETS, kind_of, pair_names, target_modules
from trainer_cell.training.lr_schedule import SchedulerState, read_scheduler
from trainer_cell.training.model_shape import ModelShape

Tensors = dict[str, torch.Tensor]
Features = Mapping[str, tuple[int, int]]

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}
_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Counters:
    """step: Adam's; iteration: optimizer steps in the model's life; adam_params: of the last step; None where it is
    not told."""

    step: int = 0
    iteration: int | None = None
    adam_params: AdamParams | None = None
    scheduler: SchedulerState | None = None


@dataclass(frozen=True)
class Foreign:
    """parts: part (`weight`, `master`, `exp_avg`, `exp_avg_sq`) → PEFT name → whole tensor, as an ordinary checkpoint
    of this dtype has them. remarks: what the caller should know, one line each."""

    spec: AdapterSpec
    dtype: Literal["fp32", "bf16"]
    parts: dict[str, Tensors]
    counters: Counters
    remarks: tuple[str, ...] = ()

    @property
    def has_optimizer(self) -> bool:
        return "exp_avg" in self.parts


def features_of(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """(out, in) of every projection an adapter may sit on, by module path, in the order of the model."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    features: dict[str, tuple[int, int]] = {}
    for layer in range(shape.num_layers):
        attention, mlp = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
        features |= {f"{attention}q_proj": (queries, shape.hidden), f"{attention}k_proj": (keys, shape.hidden)}
        features |= {f"{attention}v_proj": (keys, shape.hidden), f"{attention}o_proj": (shape.hidden, queries)}
        features |= {f"{mlp}{kind}_proj": (shape.mlp_width, shape.hidden) for kind in ("gate", "up")}
        features |= {f"{mlp}down_proj": (shape.hidden, shape.mlp_width)}
    return features | {"lm_head": (shape.vocab, shape.hidden)}


def shapes_of(features: Features, spec: AdapterSpec) -> dict[str, tuple[int, int]]:
    """The whole shape of each of an adapter's tensors."""
    targets = target_modules(spec)
    shapes: dict[str, tuple[int, int]] = {}
    for projection, (out_features, in_features) in features.items():
        if kind_of(projection) in targets:
            a, b = pair_names(projection)
            shapes |= {a: (spec.rank, in_features), b: (out_features, spec.rank)}
    return shapes


def spec_of(kinds: Iterable[str], rank: int, alpha: float) -> AdapterSpec:
    """Raises `Incompatible` for kinds of projection that are not all of attention, all of the MLP, or the output."""
    found = set(kinds)
    switches = {switch: bool(found & set(of_switch)) for switch, of_switch in TARGETS.items()}
    for switch, of_switch in TARGETS.items():
        if switches[switch] and not found >= set(of_switch):
            raise Incompatible(
                f"targets: the adapter sits on {told(sorted(found & set(of_switch)))} and not on "
                f"{told(sorted(set(of_switch) - found))}; here it sits on all of them or on none"
            )
    unknown = found - {kind for of_switch in TARGETS.values() for kind in of_switch}
    if unknown or not found:
        raise Incompatible(f"targets: {told(sorted(unknown)) or 'there are none'}, which no adapter here sits on")
    if rank < 1 or not (isfinite(alpha) and alpha > 0):
        raise Incompatible(f"rank is {rank} and alpha {alpha}: both must be positive and finite")
    return AdapterSpec(rank, alpha, **switches)


def assembled(
    spec: AdapterSpec, features: Features, parts: dict[str, Tensors], counters: Counters, remarks: Iterable[str] = ()
) -> Foreign:
    """Check every tensor and put them into the form of an ordinary checkpoint.

    parts: `weight` alone, or with `exp_avg`, `exp_avg_sq` and, unless the weights are FP32, `master`. Weights in F16,
    or of several dtypes, become FP32, which changes no value. Raises `SourceDamaged`, `Incompatible`, `NonFinite`.
    """
    shapes = shapes_of(features, spec)
    for part, tensors in parts.items():
        _check_part(part, tensors, shapes)
    dtypes = {tensor.dtype for tensor in parts["weight"].values()}
    dtype: Literal["fp32", "bf16"] = "bf16" if dtypes == {torch.bfloat16} else "fp32"
    has_optimizer = "exp_avg" in parts
    if has_optimizer and "master" not in parts and dtypes != {torch.float32}:
        raise SourceDamaged("the optimizer's state holds no FP32 masters of weights that are not FP32")
    if "master" in parts:
        _check_masters(parts)
    if dtype == "fp32" and "master" in parts:
        parts = {**parts, "weight": parts["master"]}
    ready = {
        part: {name: parts[part][name].to(_DTYPES[part_dtype(part, dtype)]).contiguous() for name in shapes}
        for part in stored_parts(dtype, has_optimizer)
    }
    return Foreign(spec, dtype, ready, counters, tuple(remarks))


def _check_part(part: str, tensors: Tensors, shapes: Mapping[str, tuple[int, int]]) -> None:
    what = "" if part == "weight" else f" ({part})"
    missing = [f"{name}{what}" for name in shapes if name not in tensors]
    if missing:
        raise SourceDamaged(f"missing tensors: {told(missing)}")
    unexpected = [f"{name}{what}" for name in tensors if name not in shapes]
    if unexpected:
        raise Incompatible(f"unexpected tensors: {told(unexpected)}")
    for name, shape in shapes.items():
        tensor = tensors[name]
        if tuple(tensor.shape) != shape:
            raise Incompatible(f"{name}{what}: has shape {list(tensor.shape)}, expected {list(shape)}")
        if tensor.dtype not in (_WEIGHT_DTYPES if part == "weight" else (torch.float32,)):
            raise Incompatible(f"{name}{what}: is {tensor.dtype}, which is not read here")
        if not bool(torch.isfinite(tensor).all()):
            raise NonFinite(f"{name}{what}: holds NaN or infinite values")
        if part == "exp_avg_sq" and bool((tensor < 0).any()):
            raise Incompatible(f"{name}{what}: holds negative values, so it is no second moment")


def _check_masters(parts: Mapping[str, Tensors]) -> None:
    """Masters that the weights are not rounded from are stale: the next step would undo what the weights hold."""
    for name, weight in parts["weight"].items():
        if not torch.equal(parts["master"][name].to(weight.dtype), weight):
            raise SourceDamaged(f"{name}: the FP32 master is not what the weight was rounded from")


def scheduler_of(state: object) -> SchedulerState | None:
    """The fields of a state of Megatron's scheduler; raises `Incompatible` for one that no load would take."""
    if state is None:
        return None
    if not isinstance(state, dict):
        raise Incompatible("the scheduler's state is no map of fields")
    for field, value in state.items():
        is_plain = isinstance(value, str | int) or (isinstance(value, float) and isfinite(value))
        if not isinstance(field, str) or not is_plain:
            raise Incompatible(f"the scheduler's {field} is {value!r}, not a finite number, text or truth value")
    try:
        read_scheduler(state)
    except CommandFailed as failure:
        raise Incompatible(f"the scheduler's state is not taken: {failure.message}") from failure
    return dict(state)
