"""Adapter states to import and export: random values in every tensor, as an ordinary checkpoint or as whole tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from trainer_cell.checkpoint.formats.foreign import Counters, Foreign, Tensors, assembled, features_of, shapes_of
from trainer_cell.checkpoint.formats.publish_foreign import Destination, publish
from trainer_cell.checkpoint.formats.run import Imported, ImportJob, run_import
from trainer_cell.protocol.commands import AdamParams, AdapterSpec
from trainer_cell.training.adapter_names import pair_names
from trainer_cell.training.model_shape import read_shape
from trainer_cell.training.safetensors_files import weights_digest
from trainer_cell.vault.layout import CheckpointAddress, Vault

EVERYTHING = AdapterSpec(4, 8.0, train_attn=True, train_mlp=True, train_unembed=True)
LAYERS = AdapterSpec(4, 8.0, train_attn=True, train_mlp=True, train_unembed=False)
ADAM = AdamParams(1e-3, 0.9, 0.95, 1e-8, 0.01, 1.0)
SCHEDULER: dict[str, float | int | str | bool] = {
    "max_lr": 0.001,
    "lr_warmup_steps": 10,
    "num_steps": 37,
    "lr_decay_style": "cosine",
    "lr_decay_steps": 100,
    "min_lr": 0.0001,
    "start_wd": 0.0,
    "end_wd": 0.1,
    "wd_incr_steps": 100,
    "wd_incr_style": "linear",
}
COUNTERS = Counters(step=5, iteration=9, adam_params=ADAM, scheduler=SCHEDULER)
ADDRESS = CheckpointAddress("imported:import:0", "weights", "one")


def random_state(
    base: Path,
    spec: AdapterSpec = EVERYTHING,
    dtype: str = "bf16",
    seed: int = 0,
    counters: Counters = COUNTERS,
    shared: bool = False,
) -> Foreign:
    """With an optimizer. shared: the projections of one fused layer have the same A, as where there is only one."""
    generator = torch.Generator().manual_seed(seed)
    features = features_of(read_shape(base))
    shapes = shapes_of(features, spec)

    def draw() -> Tensors:
        drawn = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        return _with_shared(drawn) if shared else drawn

    master, exp_avg = draw(), draw()
    parts = {"weight": master, "exp_avg": exp_avg, "exp_avg_sq": {name: t.square() for name, t in draw().items()}}
    if dtype == "bf16":
        parts |= {"master": master, "weight": {name: tensor.bfloat16() for name, tensor in master.items()}}
    return assembled(spec, features, parts, counters)


def _with_shared(tensors: Tensors) -> Tensors:
    first = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
    shared = dict(tensors)
    for name in tensors:
        for later, earlier in first.items():
            if f".{later}.lora_A." in name:
                shared[name] = tensors[name.replace(later, earlier)]
    return shared


def published(root: Path, base: Path, foreign: Foreign, address: CheckpointAddress = ADDRESS) -> Path:
    """The directory of an ordinary checkpoint with that state."""
    vault = Vault(root)
    vault.create()
    destination = Destination(address, False, "7e", "cellgate/tiny", weights_digest(base))
    return vault.version_dir(publish(vault, foreign, destination)[0])


def import_job(source: Path, root: Path, base: Path, **changes: object) -> Imported:
    """An import of everything there is, by default; `changes` are fields of `ImportJob`."""
    job: dict[str, object] = {
        "source": source,
        "format": None,
        "base_model": str(base),
        "cache": root.parent / "cache",
        "root": root,
        "address": ADDRESS,
        "overwrite": False,
        "tenant_digest": "7e",
        "alpha": None,
        "with_optimizer": True,
        "trust_pickle": False,
        "within": None,
    }
    return run_import(ImportJob(**{**job, **changes}))  # type: ignore[arg-type]


def stored_bytes(foreign: Foreign, parts: tuple[str, ...] | None = None) -> dict[str, bytes]:
    """What `tests.service.state.read_state` tells of a checkpoint with this state."""
    return {
        f"{name}/{part}": bytes(tensor.contiguous().view(torch.uint8).numpy())
        for part in parts or tuple(foreign.parts)
        for name, tensor in foreign.parts[part].items()
    }


def pair(tensors: Mapping[str, torch.Tensor], projection: str) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = pair_names(projection)
    return tensors[a], tensors[b]


def left_in(root: Path) -> list[str]:
    """Everything under a checkpoint root but its own directories for staging."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.name != ".staging")
