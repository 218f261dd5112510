"""PEFT adapters: what is read of them, and that config and tensors are checked against each other."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.service.state import read_state
from tests.trainer_cell.checkpoint.formats.peft_writer import write_peft_files
from tests.trainer_cell.checkpoint.formats.states import (
    ADDRESS,
    EVERYTHING,
    LAYERS,
    import_job,
    left_in,
    random_state,
    stored_bytes,
)
from trainer_cell.checkpoint.formats.errors import (
    FormatRefused,
    Incompatible,
    NonFinite,
    SourceDamaged,
    UnknownFormat,
)
from trainer_cell.protocol.commands import AdapterSpec, ByteQuota
from trainer_cell.protocol.errors import CommandFailed, ErrorKind


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_weights_come_in_bit_for_bit(tmp_path: Path, root: Path, tiny: Path, dtype: str, pickled: bool) -> None:
    state = random_state(tiny, dtype=dtype)
    write_peft_files(tmp_path / "adapter", state, pickled)
    told = import_job(tmp_path / "adapter", root, tiny)
    assert (told.format, told.has_optimizer, told.step, told.iteration) == ("peft", False, 0, 0)
    found = read_state(root, ADDRESS.uri)
    assert found.tensors == stored_bytes(state, ("weight",))
    assert (found.manifest.adapter, found.manifest.dtype) == (EVERYTHING, dtype)


@pytest.mark.parametrize(
    "targets",
    [
        "all-linear",
        r".*\.(self_attn|mlp)\.\w+_proj",
        ["self_attn.q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "mlp.down_proj"],
    ],
)
def test_targets_may_be_written_as_peft_lets_them(tmp_path: Path, root: Path, tiny: Path, targets: Any) -> None:
    write_peft_files(tmp_path / "adapter", random_state(tiny, LAYERS), target_modules=targets)
    import_job(tmp_path / "adapter", root, tiny)
    assert read_state(root, ADDRESS.uri).manifest.adapter == LAYERS


def test_each_part_of_an_adapter_may_come_alone(tmp_path: Path, root: Path, tiny: Path) -> None:
    for switch in ("train_attn", "train_mlp", "train_unembed"):
        flags = dict.fromkeys(("train_attn", "train_mlp", "train_unembed"), False) | {switch: True}
        spec = AdapterSpec(2, 3.0, **flags)
        write_peft_files(tmp_path / switch, random_state(tiny, spec))
        import_job(tmp_path / switch, root, tiny, overwrite=True)
        assert read_state(root, ADDRESS.uri).manifest.adapter == spec


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_rslora", True),
        ("use_dora", True),
        ("bias", "all"),
        ("modules_to_save", ["lm_head"]),
        ("rank_pattern", {"q_proj": 2}),
        ("alpha_pattern", {"q_proj": 2}),
        ("layers_to_transform", [0]),
        ("fan_in_fan_out", True),
        ("init_lora_weights", "pissa"),
        ("peft_type", "IA3"),
        ("peft_type", None),
        ("task_type", "SEQ_CLS"),
        ("trainable_token_indices", [1]),
        ("a_field_of_next_year", True),
        ("r", 8),
        ("r", 0),
        ("r", "4"),
        ("lora_alpha", 0),
        ("lora_alpha", None),
        ("target_modules", ["q_proj"]),
        ("target_modules", []),
        ("target_modules", None),
        ("target_modules", "("),
        ("target_modules", ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]),
    ],
)
def test_a_setting_that_changes_what_the_tensors_mean_is_refused_by_name(
    tmp_path: Path, root: Path, tiny: Path, field: str, value: object
) -> None:
    write_peft_files(tmp_path / "adapter", random_state(tiny), **{field: value})
    with pytest.raises(Incompatible, match="r is" if field == "r" else field):
        import_job(tmp_path / "adapter", root, tiny)
    assert left_in(root) == []


def test_another_alpha_than_the_configs_is_refused(tmp_path: Path, root: Path, tiny: Path) -> None:
    write_peft_files(tmp_path / "adapter", random_state(tiny))
    with pytest.raises(Incompatible, match="alpha"):
        import_job(tmp_path / "adapter", root, tiny, alpha=16.0)
    assert import_job(tmp_path / "adapter", root, tiny, alpha=8.0).format == "peft"


V_A = "base_model.model.model.layers.3.self_attn.v_proj.lora_A.weight"
V_B = V_A.replace("lora_A", "lora_B")


def nan_in(tensor: torch.Tensor) -> None:
    tensor[0, 0] = float("nan")


REFUSALS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], type[FormatRefused], str]] = {
    "a tensor is missing": (lambda s: s.pop(V_B), SourceDamaged, V_B),
    "a pair is missing": (lambda s: (s.pop(V_A), s.pop(V_B)), SourceDamaged, "layers.3.self_attn.v_proj"),
    "a pair of another rank": (lambda s: s.update({V_A: s[V_A][:2].clone()}), Incompatible, "while r is 4"),
    "a tensor of another width": (lambda s: s.update({V_A: s[V_A][:, :-1].clone()}), Incompatible, V_A),
    "an embedding's adapter": (
        lambda s: s.update({"base_model.model.model.embed_tokens.lora_embedding_A": s[V_A]}),
        Incompatible,
        "lora_embedding_A",
    ),
    "a bare name": (lambda s: s.update({V_A.removeprefix("base_model.model."): s.pop(V_A)}), Incompatible, "v_proj"),
    "another model's layer": (
        lambda s: s.update({V_A.replace("layers.3", "layers.9"): s[V_A]}),
        Incompatible,
        "layers.9",
    ),
    "a whole weight": (lambda s: s.update({"base_model.model.lm_head.weight": s[V_A]}), Incompatible, "lm_head.weight"),
    "NaN": (lambda s: nan_in(s[V_A]), NonFinite, V_A),
    "integers": (lambda s: s.update({V_A: s[V_A].to(torch.int32)}), Incompatible, V_A),
    "nothing": (lambda s: s.clear(), SourceDamaged, "adapter_model.safetensors"),
}


@pytest.mark.parametrize("fault", REFUSALS)
def test_tensors_that_are_not_those_of_the_config_are_refused_by_name(
    tmp_path: Path, root: Path, tiny: Path, fault: str
) -> None:
    how, kind, named = REFUSALS[fault]
    write_peft_files(tmp_path / "adapter", random_state(tiny))
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    how(tensors)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, file)
    with pytest.raises(kind, match=named):
        import_job(tmp_path / "adapter", root, tiny)
    assert left_in(root) == []


@pytest.mark.parametrize("content", [b"", b"garbage"])
@pytest.mark.parametrize("file", ["adapter_model.safetensors", "adapter_config.json"])
def test_a_file_that_is_empty_or_garbage_is_refused_by_its_name(
    tmp_path: Path, root: Path, tiny: Path, file: str, content: bytes
) -> None:
    write_peft_files(tmp_path / "adapter", random_state(tiny))
    (tmp_path / "adapter" / file).write_bytes(content)
    with pytest.raises(SourceDamaged, match=file):
        import_job(tmp_path / "adapter", root, tiny)


def test_a_missing_file_is_refused_by_its_name(tmp_path: Path, root: Path, tiny: Path) -> None:
    write_peft_files(tmp_path / "adapter", random_state(tiny))
    (tmp_path / "adapter" / "adapter_config.json").rename(tmp_path / "config")
    with pytest.raises(SourceDamaged, match=r"adapter_config\.json"):
        import_job(tmp_path / "adapter", root, tiny)
    (tmp_path / "config").rename(tmp_path / "adapter" / "adapter_config.json")
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    with pytest.raises(SourceDamaged, match=r"adapter_model\.safetensors"):
        import_job(tmp_path / "adapter", root, tiny)


def test_a_directory_of_something_else_is_no_checkpoint(tmp_path: Path, root: Path, tiny: Path) -> None:
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "config.json").write_text(json.dumps({}))
    for source in (tmp_path / "else", tmp_path / "absent", tmp_path / "else" / "config.json"):
        with pytest.raises(UnknownFormat):
            import_job(source, root, tiny)
    assert left_in(root) == []


def test_a_tenants_quota_holds_for_imports(tmp_path: Path, root: Path, tiny: Path) -> None:
    state = random_state(tiny)
    write_peft_files(tmp_path / "adapter", state)
    num_bytes = sum(len(data) for data in stored_bytes(state, ("weight",)).values())
    with pytest.raises(CommandFailed) as failed:
        import_job(tmp_path / "adapter", root, tiny, quota=ByteQuota(1000, 1000 + num_bytes - 1))
    assert failed.value.kind is ErrorKind.QUOTA_EXCEEDED
    assert left_in(root) == []
    import_job(tmp_path / "adapter", root, tiny, quota=ByteQuota(1000, 1000 + num_bytes))
