"""Per-rank native adapters: what is read of them, under which layouts and names, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.service.state import State, read_state
from tests.trainer_cell.checkpoint.formats.native_writer import Job, change, shape_of, write_native
from tests.trainer_cell.checkpoint.formats.states import (
    ADDRESS,
    COUNTERS,
    EVERYTHING,
    SCHEDULER,
    import_job,
    left_in,
    random_state,
    stored_bytes,
)
from trainer_cell.checkpoint.formats.errors import (
    FormatRefused,
    Incompatible,
    OptimizerDoesNotMap,
)
from trainer_cell.training.model_shape import ModelShape
from trainer_cell.vault.errors import CheckpointExists

JOBS = {
    "one rank": Job(),
    "data parallel": Job(dp=2),
    "tensor parallel": Job(tp=2),
    "all of it cut": Job(tp=2, cuts_all=True),
    "stages": Job(pp=2),
    "stages of two copies": Job(tp=2, pp=2, dp=2),
    "named by place": Job(tp=2, pp=2, by_rank=False),
    "in a slot": Job(slot=3, prefix="", suffix=""),
    "padded vocabulary": Job(tp=2, padded_vocab=640),
}


def imported(root: Path) -> State:
    return read_state(root, ADDRESS.uri)


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.full)])
@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS.keys())
def test_weights_masters_moments_and_counters_come_in_bit_for_bit(
    tmp_path: Path, root: Path, tiny: Path, shape: ModelShape, job: Job, dtype: str
) -> None:
    state = random_state(tiny, dtype=dtype)
    write_native(tmp_path / "job", state, shape, job)
    told = import_job(tmp_path / "job", root, tiny)
    assert (told.format, told.has_optimizer, told.has_scheduler, told.remarks) == ("native", True, True, ())
    found = imported(root)
    assert found.tensors == stored_bytes(state)
    manifest = found.manifest
    assert (manifest.step, manifest.iteration, manifest.scheduler) == (5, 9, SCHEDULER)
    assert (manifest.adapter, manifest.dtype, manifest.adam_params) == (EVERYTHING, dtype, None)
    assert (manifest.has_optimizer, manifest.has_scheduler) == (True, True)


@pytest.mark.parametrize("job", [Job(is_fused=True), Job(tp=2, is_fused=True), Job(tp=2, is_fused=True, cuts_all=True)])
def test_a_pair_for_several_projections_becomes_one_for_each_and_its_optimizer_is_refused(
    tmp_path: Path, root: Path, tiny: Path, shape: ModelShape, job: Job
) -> None:
    state = random_state(tiny, shared=True)
    write_native(tmp_path / "job", state, shape, job)
    with pytest.raises(OptimizerDoesNotMap, match="one A serves q, k, v"):
        import_job(tmp_path / "job", root, tiny)
    assert left_in(root) == []
    import_job(tmp_path / "job", root, tiny, with_optimizer=False)
    found = imported(root)
    assert found.tensors == stored_bytes(state, ("weight",))
    manifest = found.manifest
    assert (manifest.has_optimizer, manifest.step, manifest.iteration) == (False, 0, 9)
    assert manifest.scheduler == SCHEDULER, "it comes along whatever becomes of the optimizer"


def test_without_an_optimizer_in_it_the_weights_come_alone_and_a_remark_says_so(
    tmp_path: Path, root: Path, tiny: Path, shape: ModelShape
) -> None:
    state = random_state(tiny)
    write_native(tmp_path / "job", state, shape, Job(tp=2), optimizer=False)
    told = import_job(tmp_path / "job", root, tiny)
    assert (told.has_optimizer, told.iteration, told.has_scheduler) == (False, 9, True)
    assert "no optimizer state" in told.remarks[0]
    assert imported(root).tensors == stored_bytes(state, ("weight",))


def test_without_training_states_only_the_weights_are_known(
    tmp_path: Path, root: Path, tiny: Path, shape: ModelShape
) -> None:
    write_native(tmp_path / "job", random_state(tiny), shape, Job(), training_state=False)
    told = import_job(tmp_path / "job", root, tiny)
    assert (told.step, told.iteration, told.has_optimizer, told.has_scheduler) == (0, 0, False, False)


def test_an_optimizer_that_has_not_stepped_has_zero_moments(
    tmp_path: Path, root: Path, tiny: Path, shape: ModelShape
) -> None:
    state = random_state(tiny, counters=dataclasses.replace(COUNTERS, step=0))
    write_native(tmp_path / "job", state, shape, Job())
    change(tmp_path / "job" / "training_state_rank0.pt", lambda s: s["optimizer"]["optimizer"]["state"].clear())
    assert import_job(tmp_path / "job", root, tiny).has_optimizer
    found = imported(root)
    assert found.part("master") == {k: v for k, v in stored_bytes(state).items() if k.endswith("/master")}
    assert not any(any(data) for part in ("exp_avg", "exp_avg_sq") for data in found.part(part).values())


def test_an_fp32_optimizer_keeps_no_masters_of_its_own(
    tmp_path: Path, root: Path, tiny: Path, shape: ModelShape
) -> None:
    state = random_state(tiny, dtype="fp32")
    write_native(tmp_path / "job", state, shape, Job(tp=2))
    import_job(tmp_path / "job", root, tiny)
    assert imported(root).tensors == stored_bytes(state)


def test_half_precision_weights_become_fp32_ones_of_the_same_values(
    tmp_path: Path, root: Path, tiny: Path, shape: ModelShape
) -> None:
    state = random_state(tiny, dtype="fp32")
    halved = {name: tensor.half().float() for name, tensor in state.parts["weight"].items()}
    state = dataclasses.replace(state, parts={**state.parts, "weight": halved})
    write_native(tmp_path / "job", state, shape, Job(), training_state=False)
    change(tmp_path / "job" / "adapter_megatron_rank0.pt", lambda s: s.update({k: t.half() for k, t in s.items()}))
    import_job(tmp_path / "job", root, tiny)
    assert imported(root).tensors == stored_bytes(state, ("weight",))


def test_alpha_is_given_where_nothing_tells_it(tmp_path: Path, root: Path, tiny: Path, shape: ModelShape) -> None:
    write_native(tmp_path / "job", random_state(tiny), shape, Job(), config=False)
    with pytest.raises(Incompatible, match="--alpha"):
        import_job(tmp_path / "job", root, tiny)
    import_job(tmp_path / "job", root, tiny, alpha=8.0)
    assert imported(root).manifest.adapter == EVERYTHING


def test_a_name_that_is_taken_is_refused_before_anything_is_read(tmp_path: Path, root: Path, tiny: Path) -> None:
    with pytest.raises(FormatRefused):
        import_job(tmp_path / "absent", root, tiny)
    job = tmp_path / "job"
    write_native(job, random_state(tiny), shape_of(tiny), Job())
    import_job(job, root, tiny)
    with pytest.raises(CheckpointExists):
        import_job(tmp_path / "absent", root, tiny)
    other = random_state(tiny, seed=1)
    write_native(tmp_path / "other", other, shape_of(tiny), Job())
    import_job(tmp_path / "other", root, tiny, overwrite=True)
    assert imported(root).tensors == stored_bytes(other)
