"""The state of one rank's Adam in `torch.optim`'s form, by parameter name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch

from trainer_cell.checkpoint.formats.errors import OptimizerDoesNotMap, SourceDamaged
from trainer_cell.checkpoint.formats.foreign import Tensors

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Adam:
    """parts: `exp_avg`, `exp_avg_sq` and, where masters are kept, `master` → parameter name → tensor, FP32."""

    step: int
    parts: dict[str, Tensors]


def read_adam(state: Any, parameters: Mapping[str, torch.Tensor], file: str) -> Adam:
    """state: as `checkpoint.formats.native` tells; parameters: the rank's, in the order in which Adam numbers them.

    A state from before the first step holds no moments, which are zero then. Raises `SourceDamaged`,
    `OptimizerDoesNotMap`; `file` is for messages.
    """
    if isinstance(state, list) and len(state) == 1:
        state = state[0]
    masters = None
    if isinstance(state, dict) and "fp32_from_fp16_params" in state:
        masters, state = state["fp32_from_fp16_params"], state.get("optimizer")
    if not isinstance(state, dict) or not _are_groups(state.get("param_groups")):
        raise OptimizerDoesNotMap(f"{file}: its optimizer's state is not that of one Adam")
    if not isinstance(state.get("state"), dict):
        raise OptimizerDoesNotMap(f"{file}: its optimizer's state holds no moments: they are kept elsewhere")
    groups = [group for group in state["param_groups"] if group["params"]]
    if len(groups) != 1 or len(groups[0]["params"]) != len(parameters):
        numbers = " and ".join(str(len(group["params"])) for group in groups)
        raise OptimizerDoesNotMap(
            f"{file}: has {len(parameters)} tensors, its optimizer groups of {numbers} parameters: which is which is "
            "not told"
        )
    [group] = groups
    entries = dict(zip(parameters, (state["state"].get(number) for number in group["params"]), strict=True))
    parts, step = _moments(entries, parameters, group.get("step"), file)
    if masters is not None:
        parts["master"] = _masters(masters, parameters, file)
    return Adam(step, parts)


def _are_groups(groups: Any) -> bool:
    return isinstance(groups, list) and all(
        isinstance(group, dict)
        and isinstance(group.get("params"), list)
        and all(isinstance(number, int) for number in group["params"])
        for group in groups
    )


def _moments(
    entries: Mapping[str, Any], parameters: Mapping[str, torch.Tensor], group_step: Any, file: str
) -> tuple[dict[str, Tensors], int]:
    if not any(entries.values()):
        if _as_step(group_step, file) > 0:
            raise SourceDamaged(f"{file}: its optimizer has stepped and holds no moments")
        zeros = {part: {name: torch.zeros(tensor.shape) for name, tensor in parameters.items()} for part in _MOMENTS}
        return zeros, 0
    parts: dict[str, Tensors] = {part: {} for part in _MOMENTS}
    steps = set()
    for name, entry in entries.items():
        if not isinstance(entry, dict):
            raise SourceDamaged(f"{file}: the optimizer's state of {name} is missing")
        unknown = entry.keys() - {*_MOMENTS, "step"}
        if unknown:
            raise OptimizerDoesNotMap(f"{file}: the optimizer's state of {name} holds {', '.join(sorted(unknown))}")
        steps.add(_as_step(entry.get("step", group_step), f"{file}: {name}"))
        for part in _MOMENTS:
            parts[part][name] = _like(entry.get(part), parameters[name], f"{file}: {name} ({part})")
    if len(steps) != 1:
        raise SourceDamaged(f"{file}: its optimizer's parameters are at different steps: {sorted(steps)}")
    return parts, steps.pop()


def _masters(masters: Any, parameters: Mapping[str, torch.Tensor], file: str) -> Tensors:
    if not isinstance(masters, list) or not all(isinstance(group, list) for group in masters):
        raise SourceDamaged(f"{file}: fp32_from_fp16_params is no list of groups")
    flat = [tensor for group in masters for tensor in group]
    if len(flat) != len(parameters):
        raise SourceDamaged(f"{file}: {len(flat)} FP32 masters for {len(parameters)} tensors")
    return {
        name: _like(tensor, parameters[name], f"{file}: {name} (master)")
        for name, tensor in zip(parameters, flat, strict=True)
    }


def _like(tensor: Any, parameter: torch.Tensor, what: str) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise SourceDamaged(f"{what}: is missing")
    if tensor.shape != parameter.shape or tensor.dtype != torch.float32:
        raise SourceDamaged(f"{what}: is {tensor.dtype} {list(tensor.shape)}, expected FP32 {list(parameter.shape)}")
    return tensor.detach()


def _as_step(step: Any, what: str) -> int:
    value = step.item() if isinstance(step, torch.Tensor) and step.numel() == 1 else step
    if value is None:
        return 0
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    if not is_number or value != int(value) or value < 0:
        raise SourceDamaged(f"{what}: the optimizer's step is {value!r}")
    return int(value)
