"""Base weights out of what Megatron saved: the very bits, or a reason."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.trainer_cell import odd_base
from tests.trainer_cell.training.arithmetic import REPOSITORY, run_program
from tests.trainer_cell.training.conftest import ALONE
from trainer_cell.ranks import Ranks
from trainer_cell.training.base_models import prepare_weights
from trainer_cell.training.build import Base, build_base
from trainer_cell.training.megatron_weights import to_hugging_face
from trainer_cell.training.model_shape import read_shape
from trainer_cell.training.prepare_base import main as prepare_base
from trainer_cell.training.safetensors_files import DamagedBase, weights_digest
from trainer_cell.training.tiny_base import CONFIG

_HEAD_DIM, _KV_HEADS, _HEADS = 8, 4, 8


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def megatrons(base: Base) -> dict[str, torch.Tensor]:
    """The model's parameters by the names that layers of their own have, as one stacks what is alike."""
    return {name: parameter.detach().clone() for name, parameter in base.model.named_parameters()}


def stacked(tensors: dict[str, torch.Tensor], num_layers: int) -> dict[str, torch.Tensor]:
    """As a checkpoint has layers that are alike, with the names that Transformer Engine gives to norms."""
    found = {name: tensor for name, tensor in tensors.items() if not name.startswith("decoder.layers.")}
    for name in sorted(tensors):
        if name.startswith("decoder.layers.0."):
            rest = name.removeprefix("decoder.layers.0.")
            renamed = rest.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
            renamed = renamed.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
            layers = [tensors[f"decoder.layers.{layer}.{rest}"] for layer in range(num_layers)]
            found[f"decoder.layers.{renamed}"] = torch.stack(layers)
    return found


def write_family(directory: Path, tiny: Path, family: str) -> Path:
    """Tiny, as one of the families that have more tensors in a layer."""
    tensors, generator = load_file(tiny / "model.safetensors"), torch.Generator().manual_seed(1)
    sizes = {"q": _HEADS * _HEAD_DIM, "k": _KV_HEADS * _HEAD_DIM, "v": _KV_HEADS * _HEAD_DIM}
    for layer in range(CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.self_attn."
        if family == "qwen2":
            more = {f"{prefix}{kind}_proj.bias": size for kind, size in sizes.items()}
        else:
            more = {f"{prefix}{kind}_norm.weight": _HEAD_DIM for kind in "qk"}
        tensors |= {name: torch.rand(size, generator=generator) for name, size in more.items()}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({**CONFIG, "model_type": family}))
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("model", ["tiny", "odd", "qwen2", "qwen3"])
def test_what_is_read_into_a_model_comes_out_as_it_went_in(
    tiny: Path, ranks: Ranks, tmp_path: Path, model: str
) -> None:
    if model == "odd":
        directory = odd_base.write(tmp_path / model)
    else:
        directory = tiny if model == "tiny" else write_family(tmp_path / model, tiny, model)
    base = build_base(directory, ALONE, torch.device("cpu"), torch.float32)
    original, shape = load_file(directory / "model.safetensors"), read_shape(directory)
    tensors = megatrons(base)
    assert same(to_hugging_face(tensors, shape), original)
    assert same(to_hugging_face(stacked(tensors, shape.num_layers), shape), original)
    # A tied output layer may be there a second time.
    padded = {**tensors, "output_layer.weight": tensors["embedding.word_embeddings.weight"]} if shape.tied else tensors
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        padded = {**padded, name: torch.cat([padded[name], torch.ones(7, shape.hidden)])}
    assert same(to_hugging_face(padded, shape), original)


FUSED = "decoder.layers.0.self_attention.linear_qkv.weight"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({FUSED: None}, "linear_qkv.weight is missing"),
        ({"decoder.final_layernorm.weight": None}, "final_layernorm.weight is missing"),
        ({FUSED: torch.zeros(127, 64)}, r"linear_qkv.weight has shape \[127, 64\]"),
        ({"embedding.word_embeddings.weight": torch.zeros(511, 64)}, "word_embeddings.weight has shape"),
        ({"decoder.layers.0.self_attention.linear_proj.bias": torch.zeros(64)}, "linear_proj.bias has no place"),
        ({"output_layer.weight": torch.zeros(512 + 8193, 64)}, "output_layer.weight has shape"),
        ({"embedding.position_embeddings.weight": torch.zeros(8, 64)}, "position_embeddings.weight has no place"),
    ],
)
def test_another_model_is_refused_by_the_name_of_the_tensor(base: Base, change: dict[str, Any], named: str) -> None:
    tensors = {**megatrons(base), **change}
    with pytest.raises(DamagedBase, match=named):
        to_hugging_face({name: tensor for name, tensor in tensors.items() if tensor is not None}, base.shape)


@pytest.fixture(scope="module")
def saved(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny, as Megatron saves it, with a padded vocabulary."""
    directory = tmp_path_factory.mktemp("megatron") / "iter_0000007"
    run_program("megatron_checkpoint", tiny, directory, 1, 1, 16)
    return directory


def test_a_checkpoint_of_megatrons_becomes_the_base_model_it_was_saved_of(
    tiny: Path, saved: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    prepared = prepare_weights(tiny, saved, tmp_path)
    assert weights_digest(prepared) == weights_digest(tiny)
    assert {file.name for file in prepared.iterdir()} == {file.name for file in tiny.iterdir()}
    assert prepare_weights(tiny, saved, tmp_path) == prepared
    assert capfd.readouterr().err.count("preparing") == 1
    assert prepare_base(["tiny", "--cache", str(tmp_path), "--weights", str(saved)]) == 0
    assert capfd.readouterr().out == f"{prepared}\n"


@pytest.mark.full
def test_other_content_is_another_base_model(tiny: Path, saved: Path, tmp_path: Path) -> None:
    changed = shutil.copytree(saved, tmp_path / "changed")
    (changed / "surplus.txt").write_text("")
    assert prepare_weights(tiny, changed, tmp_path) != prepare_weights(tiny, saved, tmp_path)


def broken(saved: Path, into: Path, how: str) -> Path:
    directory = shutil.copytree(saved, into)
    if how == "empty":
        shutil.rmtree(directory)
        directory.mkdir()
    elif how == "no metadata":
        (directory / ".metadata").unlink()
    elif how == "short":
        [largest] = sorted(directory.glob("*.distcp"), key=lambda file: file.stat().st_size)[-1:]
        largest.write_bytes(largest.read_bytes()[:-1000])
    return directory


@pytest.mark.parametrize(
    "how",
    [
        "short",
        pytest.param("empty", marks=pytest.mark.full),
        pytest.param("no metadata", marks=pytest.mark.full),
        pytest.param("another model's", marks=pytest.mark.full),
    ],
)
def test_a_checkpoint_that_cannot_be_used_is_told_and_leaves_nothing(
    tiny: Path, saved: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], how: str
) -> None:
    directory = broken(saved, tmp_path / "broken", how)
    base = odd_base.write(tmp_path / "odd") if how == "another model's" else tiny
    assert prepare_base([str(base), "--cache", str(tmp_path / "cache"), "--weights", str(directory)]) == 1
    told = capfd.readouterr()
    assert told.out == ""
    assert told.err.splitlines()[-1] == f"the base weights in {directory} cannot be used (see above)"
    assert "Traceback" not in told.err
    assert not [path.name for path in (tmp_path / "cache" / "base").iterdir() if path.is_dir()]


@pytest.mark.full
@pytest.mark.parametrize("layout", ["2x1", "1x2"])
def test_the_layout_it_was_saved_under_does_not_matter(tiny: Path, tmp_path: Path, layout: str) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    program = "tests.trainer_cell.training.programs.megatron_checkpoint"
    arguments = [str(tiny), str(tmp_path / "saved"), *layout.split("x"), "3"]
    subprocess.run([*torchrun, program, *arguments], cwd=REPOSITORY, check=True, timeout=300)
    assert weights_digest(prepare_weights(tiny, tmp_path / "saved", tmp_path)) == weights_digest(tiny)
