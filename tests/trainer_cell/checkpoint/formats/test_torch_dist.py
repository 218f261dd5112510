"""Megatron's `torch_dist` form, out and in, through the program itself: megatron-core runs in its process alone."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.service.state import State, read_state
from tests.trainer_cell.checkpoint.formats.states import (
    ADAM,
    ADDRESS,
    EVERYTHING,
    SCHEDULER,
    import_job,
    left_in,
    pair,
    published,
    random_state,
    stored_bytes,
)
from tests.trainer_cell.checkpoint.formats.test_pickles import Trap
from trainer_cell.checkpoint.formats.errors import (
    FormatRefused,
    Incompatible,
    OptimizerDoesNotMap,
    SourceDamaged,
    UnsafePickle,
)
from trainer_cell.checkpoint.formats.torch_dist import adapter_of
from trainer_cell.training.model_shape import ModelShape, read_shape
from trainer_cell.training.projections import fuse

ROOT = Path(__file__).resolve().parents[4]


def formats(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trainer_cell.checkpoint.formats", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def export(root: Path, target: Path) -> None:
    arguments = ("--format", "torch_dist", "--to", str(target), "--checkpoints", str(root))
    done = formats("export", ADDRESS.uri, *arguments)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


def import_into(root: Path, source: Path, base: Path, *switches: str) -> subprocess.CompletedProcess[str]:
    arguments = ["--model-id", ADDRESS.model_id, "--name", ADDRESS.name, "--base-model", str(base)]
    return formats("import", str(source), *arguments, "--tenant-digest", "7e", "--checkpoints", str(root), *switches)


def told(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    return dict(json.loads(done.stdout.splitlines()[-1]))


def imported(root: Path) -> State:
    return read_state(root, ADDRESS.uri)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    """Of a checkpoint in BF16."""
    return exported_as("bf16", tmp_path_factory, tiny)


def exported_as(dtype: str, tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    directory = tmp_path_factory.mktemp(dtype)
    published(directory / "checkpoints", tiny, random_state(tiny, dtype=dtype))
    export(directory / "checkpoints", directory / "exported")
    return directory / "exported"


def copied(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


def test_an_export_comes_back_bit_for_bit(exported: Path, root: Path, tiny: Path) -> None:
    done = import_into(root, exported, tiny)
    assert (done.returncode, done.stderr) == (0, "")
    found = imported(root)
    assert found.tensors == stored_bytes(random_state(tiny))
    manifest = found.manifest
    assert (manifest.step, manifest.iteration, manifest.scheduler, manifest.adam_params) == (5, 9, SCHEDULER, ADAM)
    assert (manifest.has_optimizer, manifest.has_scheduler, manifest.adapter) == (True, True, EVERYTHING)


@pytest.mark.full
def test_an_export_in_fp32_comes_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, root: Path, tiny: Path
) -> None:
    exported = exported_as("fp32", tmp_path_factory, tiny)
    assert import_into(root, exported, tiny).returncode == 0
    assert imported(root).tensors == stored_bytes(random_state(tiny, dtype="fp32"))


def test_what_is_exported_is_megatrons_and_says_what_it_is(exported: Path) -> None:
    meta = json.loads((exported / "META.json").read_text())
    assert (meta["base_model"], meta["lora_rank"], meta["lora_alpha"]) == ("cellgate/tiny", 4, 8.0)
    assert (meta["train_attn"], meta["train_mlp"], meta["train_unembed"]) == (True, True, True)
    assert (meta["step"], meta["iteration"], meta["scheduler"]) == (5, 9, SCHEDULER)
    assert all(path.stat().st_size for path in exported.iterdir())
    assert json.loads((exported / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
    assert sorted(name for name in os.listdir(exported.parent) if name.startswith(".")) == [], "nothing aside is left"


@pytest.mark.full
def test_weights_only_leaves_the_optimizer_behind_and_takes_the_rest(exported: Path, root: Path, tiny: Path) -> None:
    done = import_into(root, exported, tiny, "--weights-only", "--json")
    assert told(done)["has_optimizer"] is False
    found = imported(root)
    assert found.tensors == stored_bytes(random_state(tiny), ("weight",))
    assert (found.manifest.step, found.manifest.iteration, found.manifest.scheduler) == (0, 9, SCHEDULER)


def change_meta(directory: Path, **changes: Any) -> None:
    meta = json.loads((directory / "META.json").read_text())
    (directory / "META.json").write_text(json.dumps({**meta, **changes}))


def cut_short(directory: Path) -> None:
    for shard in directory.glob("*.distcp"):
        shard.write_bytes(shard.read_bytes()[:100])


def trapped(file: Path) -> None:
    trap = Trap(file.parent / "marker")
    if file.name == "common.pt":
        torch.save({"iteration": trap}, file)
    else:
        file.write_bytes(pickle.dumps(trap))


def pointed_elsewhere(directory: Path) -> None:
    """Its data are said to lie in a file of somebody else."""
    elsewhere = directory.parent / "elsewhere.distcp"
    first = sorted(directory.glob("*.distcp"))[0]
    shutil.copy(first, elsewhere)
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    for index, place in metadata.storage_data.items():
        metadata.storage_data[index] = dataclasses.replace(place, relative_path=f"../{elsewhere.name}")
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


# What is done to an export, the error, and what it names; megatron-core is not asked.
REFUSALS: dict[str, tuple[Callable[[Path], object], type[FormatRefused], str]] = {
    "no metadata": (lambda d: (d / ".metadata").unlink(), SourceDamaged, r"\.metadata: the file is missing"),
    "empty metadata": (lambda d: (d / ".metadata").write_bytes(b""), SourceDamaged, r"\.metadata: the file is empty"),
    "no metadata.json": (
        lambda d: (d / "metadata.json").unlink(),
        SourceDamaged,
        r"metadata\.json: the file is missing",
    ),
    "an empty shard": (
        lambda d: next(d.glob("*.distcp")).write_bytes(b""),
        SourceDamaged,
        r"distcp: the file is empty",
    ),
    "no META.json": (lambda d: (d / "META.json").unlink(), SourceDamaged, r"META\.json: the file is missing"),
    "a path that leads elsewhere": (pointed_elsewhere, SourceDamaged, "in a file that is not there"),
    "a missing shard": (
        lambda d: sorted(d.glob("*.distcp"))[0].unlink(),
        SourceDamaged,
        "in a file that is not there",
    ),
    "another base": (lambda d: change_meta(d, base_digest="0" * 32), Incompatible, "base_digest"),
    "a trap in the metadata": (lambda d: trapped(d / ".metadata"), UnsafePickle, r"\.metadata"),
    "a trap in the common state": (lambda d: trapped(d / "common.pt"), UnsafePickle, r"common\.pt"),
}


@pytest.mark.parametrize("fault", REFUSALS)
def test_what_is_not_whole_or_safe_is_refused_by_name_and_leaves_nothing(
    exported: Path, root: Path, tiny: Path, tmp_path: Path, fault: str
) -> None:
    how, kind, named = REFUSALS[fault]
    source = copied(exported, tmp_path / "source")
    how(source)
    with pytest.raises(kind, match=named):
        import_job(source, root, tiny)
    assert not (source / "marker").exists()
    assert left_in(root) == []


@pytest.mark.full
@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (cut_short, "megatron-core cannot read it"),
        (lambda directory: change_meta(directory, lora_rank=8), "lora_rank is 8, by the tensors it is 4"),
        (lambda directory: change_meta(directory, step=6), "step is 6, in the common state it is 5"),
    ],
)
def test_a_refusal_is_one_line_on_stderr(
    exported: Path, root: Path, tiny: Path, tmp_path: Path, damage: Callable[[Path], None], named: str
) -> None:
    source = copied(exported, tmp_path / "source")
    damage(source)
    done = import_into(root, source, tiny)
    assert (done.returncode, done.stdout) == (1, "")
    assert named in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert left_in(root) == []


def stacked_slot(base: Path) -> dict[str, torch.Tensor]:
    """A slot as Megatron itself lays it out, by key: one A for q, k, v and for gate and up, the layers as the tensors'
    first dimension, a padded vocabulary; with one of the optimizer's moments."""
    shape, state = read_shape(base), random_state(base, shared=True)
    tensors = {}
    for prefix, part in (("", "weight"), ("chained_0.optimizer.state.exp_avg.", "exp_avg")):
        of_part = state.parts[part]
        for module, path, shorts, groups in (
            ("self_attention.linear_qkv", "self_attn", ("q", "k", "v"), shape.kv_heads),
            ("self_attention.linear_proj", "self_attn", ("o",), 1),
            ("mlp.linear_fc1", "mlp", ("gate", "up"), 1),
            ("mlp.linear_fc2", "mlp", ("down",), 1),
        ):
            pairs = [
                [pair(of_part, f"model.layers.{layer}.{path}.{short}_proj") for short in shorts]
                for layer in range(shape.num_layers)
            ]
            key = f"{prefix}decoder.layers.{module}.adapter"
            tensors[f"{key}.linear_in.weight"] = torch.stack([of_layer[0][0] for of_layer in pairs])
            tensors[f"{key}.linear_out.weight"] = torch.stack(
                [fuse([b for _, b in of_layer], groups, 0) for of_layer in pairs]
            )
        a, b = pair(of_part, "lm_head")
        tensors[f"{prefix}output_layer.adapter.linear_in.weight"] = a
        tensors[f"{prefix}output_layer.adapter.linear_out.weight"] = torch.cat([b, torch.ones_like(b)[:128]])
    return tensors


def test_a_slot_with_pairs_for_several_projections_gives_its_weights_and_not_its_optimizer(
    tiny: Path, shape: ModelShape
) -> None:
    tensors = stacked_slot(tiny)
    meta = {"lora_rank": 4, "lora_alpha": 8.0, "train_attn": True, "train_mlp": True, "train_unembed": True}
    with pytest.raises(OptimizerDoesNotMap, match=r"one A serves q, k, v.*--weights-only"):
        adapter_of(meta, tensors, {}, shape, None, with_optimizer=True)
    weights_only = adapter_of(meta, tensors, {}, shape, None, with_optimizer=False)
    expected = random_state(tiny, shared=True).parts["weight"]
    assert weights_only.parts.keys() == {"weight"}
    assert weights_only.parts["weight"].keys() == expected.keys()
    for name, tensor in weights_only.parts["weight"].items():
        assert torch.equal(tensor, expected[name]), name
    deeper = dataclasses.replace(shape, num_layers=5)
    with pytest.raises(Incompatible, match="5 layers"):
        adapter_of(meta, tensors, {}, deeper, None, with_optimizer=False)


WRITE_SLOT = """
import json, sys
from pathlib import Path
from tests.trainer_cell.checkpoint.formats.test_torch_dist import stacked_slot
from trainer_cell.checkpoint.formats.dist_checkpoint import one_process

def main(base, target):
    tensors = stacked_slot(base)
    target.mkdir()
    with one_process() as dist_checkpointing:
        of = dist_checkpointing.ShardedTensor.from_rank_offsets
        tree = {key: of(key, tensor.contiguous(), replica_id=0) for key, tensor in tensors.items()}
        dist_checkpointing.save({"adapter_weights": tree}, str(target))
    (target / "META.json").write_text(json.dumps({"lora_rank": 4, "lora_alpha": 8.0}))

if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
"""


@pytest.mark.full
def test_such_a_slot_is_read_from_its_files(tmp_path: Path, root: Path, tiny: Path) -> None:
    program = tmp_path / "write_slot.py"
    program.write_text(WRITE_SLOT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, program, tiny, tmp_path / "slot"], check=True, env=environment, capture_output=True)
    refused = import_into(root, tmp_path / "slot", tiny)
    assert refused.returncode == 1
    assert "one A serves" in refused.stderr
    assert left_in(root) == []
    assert import_into(root, tmp_path / "slot", tiny, "--weights-only").returncode == 0
    assert imported(root).tensors == stored_bytes(random_state(tiny, shared=True), ("weight",))
