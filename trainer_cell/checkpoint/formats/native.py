"""Per-rank native adapters: what each rank of a Megatron job saved of its own adapter parameters with `torch.save`.

    adapter_megatron_rank<R>.pt       for each global rank; or, where there is none of them,
    adapter_megatron_tp<T>_pp<P>.pt   for each tensor-parallel rank of each pipeline stage:
        {parameter name: tensor}, in the order of `named_parameters()`; names as in `megatron_names`, layers counted
        from the stage's first
    training_state_rank<R>.pt         for each global rank, or none at all:
        {"iteration": int or None, "optimizer": None or state, "opt_param_scheduler": None or {name: plain value}}
    adapter_config.json               optional; `r` is checked, `lora_alpha` is the alpha

Global ranks count as Megatron's do: tensor-parallel ranks first, then data-parallel ones, then stages. How many there
are of each is not written anywhere: it follows from the shapes and from the number of layers, and stages have equally
many of these. Data-parallel copies must be the same bits.

An optimizer's state is that of an Adam in `torch.optim`'s form (`state`, `param_groups`), alone or, as Megatron's
mixed-precision optimizer has it, as `optimizer` beside `fp32_from_fp16_params`, the FP32 masters in the order of the
parameters. Its parameters are numbered and not named: the n-th is the n-th of the rank's adapter file. So there must be
one group, with as many parameters as the file has; states scattered over data-parallel ranks are refused. The step is
each parameter's or its group's, the same integer everywhere. The clip norm of the last step is not in there, so the
hyper-parameters of the last step stay unknown. The state of a pair that serves several projections does not map onto
pairs of each, and is refused; its weights do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from trainer_cell.checkpoint.formats.adam_state import read_adam
from trainer_cell.checkpoint.formats.errors import Incompatible, OptimizerDoesNotMap, SourceDamaged, told
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
from trainer_cell.checkpoint.formats.megatron_names import Place
from trainer_cell.checkpoint.formats.native_shards import Grid, num_layers_of, numbered, read_grid
from trainer_cell.checkpoint.formats.source import Source
from trainer_cell.training.adapter_names import kind_of
from trainer_cell.training.model_shape import ModelShape

_STATE = re.compile(r"training_state_rank(\d+)\.pt")
_SCATTERED = re.compile(r"optimizer_param_state_rank.*\.pt")
_CONFIG = "adapter_config.json"


def read_native(source: Source, shape: ModelShape, alpha: float | None, with_optimizer: bool) -> Foreign:
    """Raises `FormatRefused`, naming the file or tensor."""
    features = features_of(shape)
    grid = read_grid(source, shape)
    first = grid.shards[0][0]
    rank = rank_of(first.places, first.tensors)
    alpha = _alpha(source, rank, alpha)
    weights = {(stage, at): shard.tensors for stage, row in enumerate(grid.shards) for at, shard in enumerate(row)}
    parts = {"weight": _whole(grid, weights, shape, features, rank)}
    counters, states = _training_states(source, grid)
    remarks = []
    if with_optimizer and states is not None:
        optimizer, counters = _optimizer(source, grid, states, counters, shape, features, rank)
        parts |= optimizer
    elif with_optimizer:
        remarks.append("there is no optimizer state here: the checkpoint holds the weights alone")
    kinds = {kind_of(name.removesuffix(".lora_A.weight")) for name in parts["weight"] if ".lora_A." in name}
    return assembled(spec_of(kinds, rank, alpha), features, parts, counters, remarks)


def _whole(
    grid: Grid,
    pieces: Mapping[tuple[int, int], Mapping[str, torch.Tensor]],
    shape: ModelShape,
    features: Features,
    rank: int,
) -> Tensors:
    """pieces: of each stage and tensor-parallel rank, by name."""
    assembly, first_layer = Assembly(shape, features, rank), 0
    for stage, row in enumerate(grid.shards):
        for name, place in row[0].places.items():
            if place.is_stacked:
                raise Incompatible(f"{name}: the name tells no layer")
            layer = None if place.layer is None else first_layer + place.layer
            assembly.add(name, place, layer, [pieces[stage, at][name] for at in range(grid.tensor)])
        first_layer += num_layers_of(row[0])
    return assembly.tensors


def _alpha(source: Source, rank: int, given: float | None) -> float:
    """The adapter_config.json beside the shards tells it, or the operator does; they must not disagree."""
    if _CONFIG not in source.names:
        if given is None:
            raise Incompatible(f"alpha: there is no {_CONFIG} that tells it; give it with --alpha")
        return given
    config = source.read_json(_CONFIG)
    stored = config.get("lora_alpha")
    if config.get("r") != rank:
        raise Incompatible(f"{_CONFIG}: r is {config.get('r')}, the tensors' rank is {rank}")
    if isinstance(stored, bool) or not isinstance(stored, int | float):
        raise Incompatible(f"{_CONFIG}: lora_alpha is {stored!r}, no number")
    if given is not None and given != stored:
        raise Incompatible(f"{_CONFIG}: lora_alpha is {stored}, --alpha says {given}")
    return float(stored)


def _training_states(source: Source, grid: Grid) -> tuple[Counters, dict[tuple[int, int], Any] | None]:
    """Iteration and scheduler, and each place's optimizer state; None where there is none."""
    files = numbered(source, _STATE)
    if not files:
        return Counters(), None
    model_ranks = len(grid.shards) * grid.tensor
    data, left = divmod(len(files), model_ranks)
    if left or not data or grid.data not in (None, data):
        wanted = model_ranks * (grid.data or 1)
        raise SourceDamaged(f"{len(files)} files training_state_rank*.pt: there must be {wanted}, some are missing")
    states = {rank: _state(source, file) for rank, file in files.items()}
    first, counters = states[0], _counters(states[0], files[0])
    for rank, state in states.items():
        if _counters(state, files[rank]) != counters:
            raise SourceDamaged(f"{files[rank]}: iteration or scheduler is not that of {files[0]}")
        if (state.get("optimizer") is None) != (first.get("optimizer") is None):
            raise SourceDamaged(f"{files[rank]}: one of it and {files[0]} holds an optimizer, the other does not")
    if first.get("optimizer") is None:
        return counters, None
    optimizers = {
        (stage, at): states[grid.first_rank(stage, at, data)]["optimizer"]
        for stage in range(len(grid.shards))
        for at in range(grid.tensor)
    }
    return counters, optimizers


def _state(source: Source, file: str) -> dict[str, Any]:
    state = source.read_torch(file)
    if not isinstance(state, dict) or "iteration" not in state:
        raise SourceDamaged(f"{file}: holds no training state")
    return state


def _counters(state: Mapping[str, Any], file: str) -> Counters:
    iteration = state["iteration"]
    if iteration is not None and (isinstance(iteration, bool) or not isinstance(iteration, int) or iteration < 0):
        raise SourceDamaged(f"{file}: iteration is {iteration!r}")
    return Counters(iteration=iteration, scheduler=scheduler_of(state.get("opt_param_scheduler")))


def _optimizer(
    source: Source,
    grid: Grid,
    states: Mapping[tuple[int, int], Any],
    counters: Counters,
    shape: ModelShape,
    features: Features,
    rank: int,
) -> tuple[dict[str, Tensors], Counters]:
    scattered = [name for name in source.names if _SCATTERED.fullmatch(name)]
    if scattered:
        raise OptimizerDoesNotMap(f"{told(scattered)}: a distributed optimizer's state is not read; {_ALONE}")
    for row in grid.shards:
        refuse_fused(row[0].places)
    of_places = {
        (stage, at): read_adam(state, grid.shards[stage][at].tensors, grid.shards[stage][at].file)
        for (stage, at), state in states.items()
    }
    steps = {adam.step for adam in of_places.values()}
    if len(steps) != 1:
        raise SourceDamaged(f"training_state_rank*.pt: the ranks' optimizers are at different steps: {sorted(steps)}")
    parts = {
        part: _whole(grid, {place: adam.parts[part] for place, adam in of_places.items()}, shape, features, rank)
        for part in of_places[0, 0].parts
    }
    return parts, Counters(steps.pop(), counters.iteration, None, counters.scheduler)


_ALONE = "the weights alone can be imported (--weights-only)"


def refuse_fused(places: Mapping[str, Place]) -> None:
    """Raises `OptimizerDoesNotMap` for a pair that serves several projections."""
    for name, place in places.items():
        if place.is_fused:
            raise OptimizerDoesNotMap(
                f"{name}: one A serves {', '.join(place.short)}, so the optimizer's state of it does not map onto "
                f"pairs of each projection; {_ALONE}"
            )
