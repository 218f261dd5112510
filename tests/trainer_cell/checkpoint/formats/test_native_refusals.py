"""What is wrong with native adapters is told by file and name, and nothing of it comes in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer_cell.checkpoint.formats.native_writer import Job, change, write_native
from tests.trainer_cell.checkpoint.formats.states import (
    LAYERS,
    SCHEDULER,
    import_job,
    left_in,
    random_state,
)
from trainer_cell.checkpoint.formats.errors import (
    FormatRefused,
    Incompatible,
    NonFinite,
    OptimizerDoesNotMap,
    SourceDamaged,
)
from trainer_cell.checkpoint.formats.foreign import Counters
from trainer_cell.training.model_shape import ModelShape

Q_B = "module.module.decoder.layers.1.self_attention.linear_qkv.adapter.adapter_q.linear_out.weight"
O_A = "module.module.decoder.layers.0.self_attention.linear_proj.adapter.linear_in.weight"


def adam_of(state: dict[str, Any]) -> dict[str, Any]:
    adam: dict[str, Any] = state["optimizer"]["optimizer"]
    return adam


def put(tensors: dict[str, Any], name: str, value: Any) -> None:
    assert name in tensors
    tensors[name] = value


def rename(tensors: dict[str, Any], old: str, new: str) -> None:
    tensors[new] = tensors.pop(old)


def first_value(tensor: torch.Tensor, value: float) -> None:
    tensor.flatten()[0] = value


# file, what is done to it (None: it is removed), the error, and what it names. The job: tp 2, pp 2.
REFUSALS: dict[str, tuple[str, Callable[[Any], object] | None, type[FormatRefused], str]] = {
    "a rank's adapter is missing": ("adapter_megatron_rank1.pt", None, SourceDamaged, "adapter_megatron_rank1.pt"),
    "the last rank's adapter is missing": ("adapter_megatron_rank3.pt", None, SourceDamaged, "3 files adapter_"),
    "a rank's state is missing": ("training_state_rank1.pt", None, SourceDamaged, "training_state_rank1.pt"),
    "the last rank's state is missing": ("training_state_rank3.pt", None, SourceDamaged, "3 files training_state"),
    "a tensor is missing": ("adapter_megatron_rank1.pt", lambda s: s.pop(Q_B), SourceDamaged, "linear_out"),
    "nothing is in a shard": ("adapter_megatron_rank0.pt", lambda s: s.clear(), SourceDamaged, "rank0.pt"),
    "a tensor of another shape": (
        "adapter_megatron_rank1.pt",
        lambda s: put(s, Q_B, s[Q_B][:-1].clone()),
        Incompatible,
        "linear_qkv.adapter.adapter_q",
    ),
    "a pair of another rank": (
        "adapter_megatron_rank1.pt",
        lambda s: put(s, Q_B, s[Q_B][:, :-1]),
        Incompatible,
        "32, 3",
    ),
    "copies that differ": (
        "adapter_megatron_rank1.pt",
        lambda s: first_value(s[Q_B.replace("linear_out", "linear_in")], 3.0),
        SourceDamaged,
        "adapter_q.linear_in.weight: the copies",
    ),
    "NaN in a weight": (
        "adapter_megatron_rank2.pt",
        lambda s: first_value(s[O_A], float("nan")),
        NonFinite,
        "model.layers.2.self_attn.o_proj.lora_A.weight",
    ),
    "infinity in a moment": (
        "training_state_rank0.pt",
        lambda s: first_value(adam_of(s)["state"][0]["exp_avg"], float("inf")),
        NonFinite,
        r"o_proj.lora_A.weight \(exp_avg\)",
    ),
    "a stale master": (
        "training_state_rank0.pt",
        lambda s: first_value(s["optimizer"]["fp32_from_fp16_params"][0][0], 100.0),
        SourceDamaged,
        "o_proj.lora_A.weight: the FP32 master",
    ),
    "a negative second moment": (
        "training_state_rank0.pt",
        lambda s: first_value(adam_of(s)["state"][0]["exp_avg_sq"], -1.0),
        Incompatible,
        "negative",
    ),
    "no moments of one parameter": (
        "training_state_rank2.pt",
        lambda s: adam_of(s)["state"].pop(3),
        SourceDamaged,
        "adapter_q.linear_out.weight is missing",
    ),
    "no masters": (
        "training_state_rank0.pt",
        lambda s: s["optimizer"].update(fp32_from_fp16_params=[[]]),
        SourceDamaged,
        "0 FP32 masters",
    ),
    "moments of another parameter": (
        "training_state_rank1.pt",
        lambda s: adam_of(s)["param_groups"][0]["params"].reverse(),
        SourceDamaged,
        "expected FP32",
    ),
    "two groups": (
        "training_state_rank1.pt",
        lambda s: adam_of(s)["param_groups"].append({"params": [adam_of(s)["param_groups"][0]["params"].pop()]}),
        OptimizerDoesNotMap,
        "adapter_megatron_rank1.pt",
    ),
    "fewer parameters than tensors": (
        "training_state_rank0.pt",
        lambda s: adam_of(s)["param_groups"][0]["params"].pop(),
        OptimizerDoesNotMap,
        "parameters",
    ),
    "moments kept elsewhere": (
        "training_state_rank0.pt",
        lambda s: adam_of(s).pop("state"),
        OptimizerDoesNotMap,
        "no moments",
    ),
    "an optimizer on some ranks only": (
        "training_state_rank1.pt",
        lambda s: s.update(optimizer=None),
        SourceDamaged,
        "training_state_rank1.pt",
    ),
    "ranks at different steps": (
        "training_state_rank1.pt",
        lambda s: adam_of(s)["param_groups"][0].update(step=6),
        SourceDamaged,
        "different steps",
    ),
    "ranks at different iterations": (
        "training_state_rank1.pt",
        lambda s: s.update(iteration=8),
        SourceDamaged,
        "iter",
    ),
    "no iteration": ("training_state_rank0.pt", lambda s: s.clear(), SourceDamaged, "training_state_rank0.pt"),
    "an iteration that is none": ("training_state_rank*.pt", lambda s: s.update(iteration=-1), SourceDamaged, "-1"),
    "a scheduler with a tensor": (
        "training_state_rank*.pt",
        lambda s: s.update(opt_param_scheduler={"max_lr": torch.ones(2)}),
        Incompatible,
        "max_lr",
    ),
    "a scheduler that makes no sense": (
        "training_state_rank*.pt",
        lambda s: s.update(opt_param_scheduler={**SCHEDULER, "lr_warmup_steps": 200}),
        Incompatible,
        "must be below decay_steps",
    ),
    "a name of two slots": (
        "adapter_megatron_rank0.pt",
        lambda s: rename(s, O_A, O_A.replace(".adapter.", ".adapters.0.adapters.1.")),
        Incompatible,
        "adapters.0.adapters.1",
    ),
    "a name of no slot": (
        "adapter_megatron_rank0.pt",
        lambda s: rename(s, O_A, O_A.replace(".adapter.", ".")),
        Incompatible,
        "linear_proj.linear_in",
    ),
    "two slots": (
        "adapter_megatron_rank0.pt",
        lambda s: s.update({O_A.replace(".adapter.", ".adapters.1."): s[O_A]}),
        Incompatible,
        "names of the same tensor",
    ),
    "no adapter's name": (
        "adapter_megatron_rank0.pt",
        lambda s: s.update({"x": s[O_A]}),
        Incompatible,
        "x: not exactly",
    ),
    "another base model's layer": (
        "adapter_megatron_rank3.pt",
        lambda s: s.update({O_A.replace("layers.0", "layers.7"): s[O_A]}),
        SourceDamaged,
        "layers.7",
    ),
    "a value that is no tensor": (
        "adapter_megatron_rank1.pt",
        lambda s: put(s, O_A, 1.0),
        SourceDamaged,
        "linear_proj",
    ),
    "a distributed optimizer": (
        "optimizer_param_state_rank0_optimizer0.pt",
        lambda s: s,
        OptimizerDoesNotMap,
        "param_st",
    ),
}


@pytest.mark.parametrize("fault", REFUSALS)
def test_what_is_not_whole_or_does_not_fit_is_refused_by_name_and_leaves_nothing(
    job_of_four: Path, root: Path, tiny: Path, tmp_path: Path, fault: str
) -> None:
    pattern, how, kind, named = REFUSALS[fault]
    directory = copied(job_of_four, tmp_path / "job")
    (directory / "optimizer_param_state_rank0_optimizer0.pt").unlink(missing_ok=True)
    if pattern.startswith("optimizer_param"):
        torch.save({}, directory / pattern)
    for file in list(directory.glob(pattern)):
        if how is None:
            file.unlink()
        else:
            change(file, how)
    with pytest.raises(kind, match=named):
        import_job(directory, root, tiny)
    assert left_in(root) == []


def test_the_job_the_refusals_start_from_is_imported(job_of_four: Path, root: Path, tiny: Path) -> None:
    assert import_job(job_of_four, root, tiny).has_optimizer


@pytest.fixture(scope="module")
def job_of_four(tmp_path_factory: pytest.TempPathFactory, tiny: Path, shape: ModelShape) -> Path:
    directory = tmp_path_factory.mktemp("native") / "job"
    write_native(directory, random_state(tiny, LAYERS, counters=Counters(5, 9)), shape, Job(tp=2, pp=2))
    return directory


def copied(directory: Path, to: Path) -> Path:
    import shutil

    shutil.copytree(directory, to)
    return to


@pytest.mark.parametrize("content", [b"", b"garbage", b"PK\x03\x04 not a zip"])
def test_a_shard_that_is_no_torch_file_is_refused_by_its_name(
    job_of_four: Path, root: Path, tiny: Path, tmp_path: Path, content: bytes
) -> None:
    directory = copied(job_of_four, tmp_path / "job")
    (directory / "adapter_megatron_rank2.pt").write_bytes(content)
    with pytest.raises(FormatRefused, match=r"adapter_megatron_rank2\.pt"):
        import_job(directory, root, tiny)
    assert left_in(root) == []


def test_a_shard_that_is_cut_short_is_refused_by_its_name(
    job_of_four: Path, root: Path, tiny: Path, tmp_path: Path
) -> None:
    directory = copied(job_of_four, tmp_path / "job")
    file = directory / "adapter_megatron_rank2.pt"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(SourceDamaged, match=r"adapter_megatron_rank2\.pt"):
        import_job(directory, root, tiny)


def test_a_config_of_another_rank_or_alpha_is_refused(
    job_of_four: Path, root: Path, tiny: Path, tmp_path: Path
) -> None:
    directory = copied(job_of_four, tmp_path / "job")
    with pytest.raises(Incompatible, match=r"lora_alpha is 8\.0, --alpha says 16"):
        import_job(directory, root, tiny, alpha=16.0)
    (directory / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 8}')
    with pytest.raises(Incompatible, match="r is 8, the tensors' rank is 4"):
        import_job(directory, root, tiny)
