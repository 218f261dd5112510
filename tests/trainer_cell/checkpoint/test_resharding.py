"""Saved under one layout, loaded under another: the very same state, and the same training from there on."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.service.forgery import forge
from tests.service.state import State
from tests.trainer_cell import odd_base
from tests.trainer_cell.client import Client
from tests.trainer_cell.running_cell import RunningCell, running_cell
from tests.trainer_cell.training.arithmetic import Tensors, batches, largest_difference
from trainer_cell.protocol.commands import AdapterSpec
from trainer_cell.protocol.errors import ErrorKind
from trainer_cell.protocol.outcomes import Failed
from trainer_cell.vault.layout import CheckpointAddress, Vault

pytestmark = pytest.mark.cell

# Ranks, tensor, pipeline; the rest is data parallel.
LAYOUTS = {
    "one": (1, 1, 1),
    "dp2": (2, 1, 1),
    "tp2": (2, 2, 1),
    "pp2": (2, 1, 2),
    "tp2-pp2": (4, 2, 2),
    "tp4": (4, 4, 1),
    "dp4": (4, 1, 1),
    "pp4": (4, 1, 4),
    "tp2-dp2": (4, 2, 1),
    "pp2-dp2": (4, 1, 2),
}
SPECS = {
    "everything": AdapterSpec(4, 8.0, train_attn=True, train_mlp=True, train_unembed=True),
    "all but the output layer": AdapterSpec(4, 8.0, train_attn=True, train_mlp=True, train_unembed=False),
    "the output layer alone": AdapterSpec(4, 8.0, train_attn=False, train_mlp=False, train_unembed=True),
}
SAMPLE = ("one", "dp2", "tp2", "pp2", "tp2-pp2")
# Six sequences of up to 64 tokens: two rows for a pipeline. What differs between layouts is the order of sums.
DATA = batches(odd_base.VOCAB, 3, (17, 5, 33, 2, 64, 21))
LIMITS = {"fp32": (1e-3, 1e-3), "bf16": (0.2, 0.2)}


@dataclass
class Saved:
    """Of a model: its state after two steps and where it lies, then what the third step said and left."""

    state: State
    version: str
    logprobs: tuple[bytes, ...]
    after: State


@pytest.mark.parametrize(
    ("dtype", "spec", "layouts"),
    [
        ("fp32", "everything", SAMPLE),
        ("bf16", "all but the output layer", ("one", "tp2", "pp2")),
        ("fp32", "the output layer alone", ("tp4", "pp2")),
        *(
            pytest.param(dtype, spec, tuple(LAYOUTS), marks=(pytest.mark.full, pytest.mark.timeout(1200)))
            for dtype in ("fp32", "bf16")
            for spec in SPECS
        ),
    ],
)
def test_a_checkpoint_of_any_layout_goes_on_under_every_other(
    tmp_path: Path, dtype: str, spec: str, layouts: tuple[str, ...]
) -> None:
    base = odd_base.write(tmp_path / "base")
    root = tmp_path / "checkpoints"
    with ExitStack() as running:
        cells = {}
        for name in layouts:
            ranks, tp, pp = LAYOUTS[name]
            started = running_cell(base, root, "--dtype", dtype, ranks=ranks, tp=tp, pp=pp)
            cells[name] = running.enter_context(started)
        saved = {name: train_and_save(cell, root, name, SPECS[spec]) for name, cell in cells.items()}
        for target, cell in cells.items():
            for source in cells:
                model = Client(cell, f"{source}-under-{target}:train:0", SPECS[spec])
                goes_on(model, root, saved[source], LIMITS[dtype], is_same=source == target)
                model.free()
        assert [cell.stop() for cell in cells.values()] == [[0] * LAYOUTS[name][0] for name in cells]
    first, *others = saved.values()
    assert all(other.state.tensors.keys() == first.state.tensors.keys() for other in others)


def train_and_save(cell: RunningCell, root: Path, layout: str, spec: AdapterSpec) -> Saved:
    model = Client(cell, f"{layout}:train:0", spec)
    model.create(seed=3)
    for step in (0, 1):
        model.train(DATA[step])
    state = model.save(root, "saved")
    hello = cell.hello.layout
    assert state.manifest.layout == hello
    assert (hello.world, hello.tensor, hello.pipeline) == LAYOUTS[layout]
    said = model.train(DATA[2])
    version = Vault(root).resolve(CheckpointAddress(model.model_id, "weights", "saved"))
    assert version is not None
    return Saved(state, version, said.logprobs, model.save(root, "after"))


def goes_on(model: Client, root: Path, saved: Saved, limits: tuple[float, float], is_same: bool) -> None:
    loaded = model.load(saved.version)
    assert (loaded.step, loaded.iteration, loaded.optimizer_restored) == (2, 2, True)
    again = model.save(root, "again")
    assert again.same_as(saved.state)
    assert again.manifest.layout == model.cell.hello.layout
    said = model.train(DATA[2]).logprobs
    after = model.save(root, "after")
    if is_same:
        assert said == saved.logprobs
        assert after.same_as(saved.after)
        return
    assert after.step == 3
    assert max(map(distance, said, saved.logprobs)) < limits[0]
    assert largest_difference(moments(after), moments(saved.after)) < limits[1]


def distance(ours: bytes, theirs: bytes) -> float:
    return float((float32(ours) - float32(theirs)).abs().max())


def moments(state: State) -> Tensors:
    return {key: float32(data) for key, data in state.part("exp_avg").items()}


def float32(data: bytes) -> Any:
    return torch.frombuffer(bytearray(data), dtype=torch.float32)


def test_the_same_seed_is_the_same_adapter_under_every_layout(tmp_path: Path) -> None:
    base = odd_base.write(tmp_path / "base")
    fresh = {}
    for name in ("one", "dp2", "tp2", "pp2"):
        ranks, tp, pp = LAYOUTS[name]
        with running_cell(base, tmp_path / "checkpoints", ranks=ranks, tp=tp, pp=pp) as cell:
            model = Client(cell, f"{name}:train:0", SPECS["everything"])
            fresh[name] = (model.create(seed=5).num_parameters, model.save(tmp_path / "checkpoints", "fresh").tensors)
            assert cell.stop() == [0] * ranks
    assert all(other == fresh["one"] for other in fresh.values())
    num_parameters, tensors = fresh["one"]
    assert 4 * num_parameters == sum(len(data) for key, data in tensors.items() if key.endswith("/weight"))


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_a_tensor_that_is_missing_or_of_another_shape_is_found_whichever_rank_it_is_for(
    tmp_path: Path, layout: str
) -> None:
    base, root = odd_base.write(tmp_path / "base"), tmp_path / "checkpoints"
    ranks, tp, pp = LAYOUTS[layout]
    with running_cell(base, root) as cell:
        saved = train_and_save(cell, root, "one", SPECS["everything"])
    uri = "tinker://one:train:0/weights/saved"
    with running_cell(base, root, ranks=ranks, tp=tp, pp=pp) as cell:
        model = Client(cell, "loading:train:0", SPECS["everything"])
        model.create(seed=1)
        before = model.save(root, "before")
        for number, key in enumerate(EVERY_STAGE):
            for how in ("missing", "short"):
                forged = forge(root, uri, f"{how}-{number}", partial(without, key, how))
                version = Vault(root).resolve(CheckpointAddress.parse(forged))
                assert version is not None
                failed = cell.execute(model.load_command(version))
                assert isinstance(failed, Failed)
                assert failed.kind is ErrorKind.CHECKPOINT_CORRUPT
                assert key in failed.message
        assert model.save(root, "after").same_as(before)
        model.load(saved.version)
        assert cell.stop() == [0] * ranks


# Of the first and of the last stage: one that tensor parallelism cuts, one that it does not, one of the optimizer.
EVERY_STAGE = (
    "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight/weight",
    "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight/weight",
    "base_model.model.lm_head.lora_B.weight/exp_avg",
    "base_model.model.lm_head.lora_A.weight/weight",
)


def without(key: str, how: str, of: str, tensor: torch.Tensor) -> torch.Tensor | None:
    if of != key:
        return tensor
    return None if how == "missing" else tensor[:-1]
