"""Writes per-rank native adapters as a Megatron job does: each rank its own parameters, under its own names."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.trainer_cell.checkpoint.formats.states import pair
from trainer_cell.checkpoint.formats.foreign import Foreign, Tensors
from trainer_cell.training.model_shape import ModelShape, read_shape
from trainer_cell.training.projections import fuse

# (megatron module, projections, whether its output is what tensor parallelism cuts)
_MODULES = (
    ("self_attention.linear_proj", ("o",), False),
    ("self_attention.linear_qkv", ("q", "k", "v"), True),
    ("mlp.linear_fc1", ("gate", "up"), True),
    ("mlp.linear_fc2", ("down",), False),
)


@dataclass(frozen=True)
class Job:
    """How the job that saves is laid out, and what its names are.

    slot: None for a job of one adapter. is_fused: one A for q, k, v and for gate and up. cuts_all: A of a
    column-parallel layer is cut along the rank, and B of a row-parallel one along its rows; else both are whole.
    padded_vocab: rows of the output layer over all ranks.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    slot: int | None = None
    is_fused: bool = False
    cuts_all: bool = False
    by_rank: bool = True
    padded_vocab: int | None = None
    prefix: str = "module.module."
    suffix: str = ".weight"

    @property
    def marker(self) -> str:
        return "adapter" if self.slot is None else f"adapters.{self.slot}"


def write_native(
    directory: Path,
    foreign: Foreign,
    shape: ModelShape,
    job: Job,
    optimizer: bool = True,
    training_state: bool = True,
    config: bool = True,
) -> None:
    directory.mkdir()
    for stage in range(job.pp):
        for tp in range(job.tp):
            parts = {part: _of_rank(tensors, foreign, shape, job, stage, tp) for part, tensors in foreign.parts.items()}
            for dp in range(job.dp):
                rank = tp + job.tp * (dp + job.dp * stage)
                name = f"rank{rank}" if job.by_rank else f"tp{tp}_pp{stage}"
                torch.save(parts["weight"], directory / f"adapter_megatron_{name}.pt")
                if training_state:
                    state = training_state_of(foreign, parts, optimizer)
                    torch.save(state, directory / f"training_state_rank{rank}.pt")
    if config:
        told = {"peft_type": "LORA", "r": foreign.spec.rank, "lora_alpha": foreign.spec.alpha}
        (directory / "adapter_config.json").write_text(json.dumps(told))


def training_state_of(foreign: Foreign, parts: dict[str, Tensors], optimizer: bool) -> dict[str, Any]:
    names = list(parts["weight"])
    step = foreign.counters.step
    has_masters = "master" in parts
    # Fused Adam keeps the step in the group, torch's own in every parameter's state.
    state = {
        number: {part: parts[part][name] for part in ("exp_avg", "exp_avg_sq")}
        | ({} if has_masters else {"step": torch.tensor(float(step))})
        for number, name in enumerate(names)
    }
    group: dict[str, Any] = {"params": list(range(len(names))), "lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.01}
    adam: dict[str, Any] = {"state": state, "param_groups": [{**group, "step": step} if has_masters else group]}
    if has_masters:
        adam = {"optimizer": adam, "fp32_from_fp16_params": [[parts["master"][name] for name in names]]}
    return {
        "iteration": foreign.counters.iteration,
        "optimizer": adam if optimizer else None,
        "opt_param_scheduler": foreign.counters.scheduler,
    }


def _of_rank(whole: Tensors, foreign: Foreign, shape: ModelShape, job: Job, stage: int, tp: int) -> Tensors:
    tensors: Tensors = {}

    def add(name: str, a: torch.Tensor, b: torch.Tensor, cuts_output: bool) -> None:
        cut_a, cut_b = _cuts(cuts_output, job)
        for half, tensor, axis in (("linear_in", a, cut_a), ("linear_out", b, cut_b)):
            piece = tensor if axis is None else tensor.chunk(job.tp, axis)[tp]
            tensors[f"{job.prefix}{name}.{half}{job.suffix}"] = piece.clone()

    spec, per_stage = foreign.spec, shape.num_layers // job.pp
    for local in range(per_stage if spec.train_attn else 0):
        layer = f"decoder.layers.{local}"
        for module, shorts, cuts_output in _MODULES:
            holder = "self_attn" if module.startswith("self_attention") else "mlp"
            paths = [f"model.layers.{stage * per_stage + local}.{holder}.{short}_proj" for short in shorts]
            pairs = [pair(whole, path) for path in paths]
            if job.is_fused and len(pairs) > 1:
                b = _fused(shape, module, [b for _, b in pairs], job)
                add(f"{layer}.{module}.{job.marker}", pairs[0][0], b, cuts_output)
                continue
            for short, (a, b) in zip(shorts, pairs, strict=True):
                own = f".adapter_{short}" if len(shorts) > 1 else ""
                add(f"{layer}.{module}.{job.marker}{own}", a, b, cuts_output)
    if spec.train_unembed and stage == job.pp - 1:
        a, b = pair(whole, "lm_head")
        padding = (job.padded_vocab or b.size(0)) - b.size(0)
        b = torch.nn.functional.pad(b, (0, 0, 0, padding), value=0.5)
        add(f"output_layer.{job.marker}", a, b, cuts_output=True)
    return tensors


def _cuts(cuts_output: bool, job: Job) -> tuple[int | None, int | None]:
    """Along which axis tensor-parallel ranks cut A and B."""
    if cuts_output:
        return (0 if job.cuts_all else None), 0
    return 1, (0 if job.cuts_all else None)


def _fused(shape: ModelShape, module: str, parts: list[torch.Tensor], job: Job) -> torch.Tensor:
    if module.endswith("linear_qkv"):
        return fuse(parts, shape.kv_heads, 0)
    return torch.cat([part.chunk(job.tp, 0)[tp] for tp in range(job.tp) for part in parts])


def shape_of(base: Path) -> ModelShape:

    return read_shape(base)


def change(file: Path, how: Callable[[Any], object]) -> None:
    content = torch.load(file, weights_only=True)
    how(content)
    torch.save(content, file)
