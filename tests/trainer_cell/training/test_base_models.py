from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.trainer_cell.training.arithmetic import REPOSITORY
from tests.trainer_cell.training.conftest import ALONE
from trainer_cell.ranks import Ranks
from trainer_cell.training.base_models import RECORD, BaseUnavailable, describe, prepare
from trainer_cell.training.build import build_base
from trainer_cell.training.model_shape import UnsupportedBase, check_layout, read_shape, shape_from_config
from trainer_cell.training.prepare_base import main as prepare_base
from trainer_cell.training.safetensors_files import DamagedBase, weights_digest
from trainer_cell.training.tiny_base import CONFIG

TINY_DIGEST = "42419370f029f0f03432b2eaf1b1b151"


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    """A base model as a user would have it: no record of ours."""
    directory = tmp_path / "mine"
    shutil.copytree(tiny, directory)
    (directory / RECORD).unlink()
    return directory


def test_tiny_is_the_same_bytes_everywhere(tiny: Path) -> None:
    assert weights_digest(tiny) == TINY_DIGEST
    described = describe(tiny, 512, 2048)
    assert (described.name, described.aliases, described.digest) == ("cellgate/tiny", ("tiny",), TINY_DIGEST)
    assert described.source == str(tiny)


def test_the_digest_does_not_depend_on_how_tensors_are_spread_over_files(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    names = sorted(tensors)
    (copy / "model.safetensors").unlink()
    save_file({name: tensors[name] for name in names[::2]}, copy / "b.safetensors")
    save_file({name: tensors[name] for name in names[1::2]}, copy / "a.safetensors")
    assert weights_digest(copy) == TINY_DIGEST


def test_the_digest_sees_values_names_shapes_and_dtypes(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    norm = tensors["model.norm.weight"]
    changed = {
        "value": {**tensors, "model.norm.weight": norm + 1e-7},
        "shape": {**tensors, "model.norm.weight": norm[None]},
        "dtype": {**tensors, "model.norm.weight": norm.view(torch.int32)},
        "name": {("x" if name == "model.norm.weight" else name): value for name, value in tensors.items()},
    }
    digests = {TINY_DIGEST}
    for content in changed.values():
        save_file(content, copy / "model.safetensors")
        digests.add(weights_digest(copy))
    assert len(digests) == 5


def test_a_prepared_model_is_found_again_without_being_written(tmp_path: Path) -> None:
    first = prepare("tiny", tmp_path)
    written = (first / "model.safetensors").stat().st_mtime_ns
    assert prepare("cellgate/tiny", tmp_path) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == written
    assert [path.name for path in first.parent.iterdir()] == ["tiny"]


def test_a_damaged_prepared_model_is_refused_by_the_cell_and_prepared_again(tmp_path: Path) -> None:
    directory = prepare("tiny", tmp_path)
    weights = directory / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(DamagedBase, match="not those"):
        describe(directory, 512, 2048)
    assert weights_digest(prepare("tiny", tmp_path)) == TINY_DIGEST


@pytest.mark.parametrize("length", [0, 4, 100, 500_000])
def test_cut_off_files_are_damaged_not_a_crash(copy: Path, length: int) -> None:
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:length])
    with pytest.raises(DamagedBase):
        weights_digest(copy)


def test_a_directory_of_the_user_is_described_and_left_alone(copy: Path, tmp_path: Path) -> None:
    before = sorted(path.name for path in copy.iterdir())
    assert prepare(str(copy), tmp_path / "cache") == copy
    assert describe(copy, 512, 2048).name == "local/mine"
    (copy / "config.json").write_text(json.dumps({**CONFIG, "_name_or_path": "some/model"}))
    assert describe(copy, 512, 2048).name == "some/model"
    assert sorted(path.name for path in copy.iterdir()) == before


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BaseUnavailable, match="/no/such/directory"):
        prepare("/no/such/directory", tmp_path)


def test_the_command_prints_the_directory_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trainer_cell.training.prepare_base", "tiny", "--cache", str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert Path(done.stdout.rstrip("\n")).samefile(tmp_path / "base" / "tiny")
    assert "preparing" in done.stderr
    command[3] = str(tmp_path / "absent")
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert "Traceback" not in done.stderr


def test_processes_that_prepare_at_once_agree_and_leave_nothing_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trainer_cell.training.prepare_base", "tiny", "--cache", str(tmp_path)]
    running = [subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    said = {process.communicate()[0] for process in running}
    assert [process.returncode for process in running] == [0] * 4
    assert said == {f"{tmp_path / 'base' / 'tiny'}\n"}
    assert [path.name for path in (tmp_path / "base").iterdir()] == ["tiny"]
    assert weights_digest(tmp_path / "base" / "tiny") == TINY_DIGEST


def test_the_byte_tokenizer_gives_text_back(tiny: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    text = "Größe, naïve ☃\n"
    ids = tokenizer.encode(text).ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.get_vocab_size() == 512


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type 'yarn'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_type 'linear'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0}}, "llama3 rope scaling without factor"),
        ({"rope_parameters": {"rope_theta": 1.0, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"model_type": "qwen2", "rope_theta": None}, "rope_theta"),
        ({"head_dim": None, "hidden_size": 60}, "hidden_size 60"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused_with_the_reason(changed: dict[str, object], why: str) -> None:
    shape_from_config(CONFIG)
    with pytest.raises(UnsupportedBase, match=why):
        shape_from_config({**CONFIG, **changed})


def test_a_config_without_a_size_is_refused_naming_it() -> None:
    with pytest.raises(UnsupportedBase, match=r"config\.json has no intermediate_size"):
        shape_from_config({name: value for name, value in CONFIG.items() if name != "intermediate_size"})


@pytest.mark.parametrize(
    ("tensor", "pipeline", "why"),
    [
        (8, 1, "4 KV heads cannot be split over 8 tensor-parallel ranks"),
        (3, 1, "8 heads and 4 KV heads and 160 MLP columns cannot be split over 3"),
        (1, 3, "4 layers cannot be split over 3 pipeline stages"),
        (8, 3, "4 KV heads cannot be split over 8 tensor-parallel ranks; 4 layers cannot be split over 3"),
    ],
)
def test_a_layout_the_model_cannot_have_is_refused_with_the_reason(
    tiny: Path, capsys: pytest.CaptureFixture[str], tensor: int, pipeline: int, why: str
) -> None:
    shape = read_shape(tiny)
    check_layout(shape, 4, 2)
    with pytest.raises(ValueError, match=why):
        check_layout(shape, tensor, pipeline)
    assert prepare_base([str(tiny), "--tp", str(tensor), "--pp", str(pipeline)]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert why in told.err
    assert told.err.count("\n") == 1


@pytest.mark.parametrize("change", ["missing", "surplus", "shape"])
def test_weights_that_do_not_fit_the_config_are_refused_naming_the_tensor(
    copy: Path, ranks: Ranks, change: str
) -> None:
    name = "model.layers.2.mlp.up_proj.weight"
    tensors = load_file(copy / "model.safetensors")
    match change:
        case "missing":
            del tensors[name]
        case "surplus":
            name = "model.layers.2.mlp.up_proj.bias"
            tensors[name] = torch.zeros(160)
        case "shape":
            tensors[name] = tensors[name][:-1].contiguous()
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(DamagedBase, match=name.replace(".", r"\.")):
        build_base(copy, ALONE, torch.device("cpu"), torch.float32)
