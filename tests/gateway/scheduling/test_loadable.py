"""Loads that cannot be: each a typed failure, told without touching a rank, the model as it was."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.fakes.fake_cell import FakeCell
from tests.gateway.scheduling.rig import (
    Rig,
    create,
    create_from,
    failed,
    forward_backward,
    load,
    path_of,
    rig,
    rig_with_cell,
    save,
    save_for_sampler,
    succeeded,
)
from tests.gateway.scheduling.saved import Saved, one_saved
from trainer_cell.protocol.commands import LoadState
from trainer_cell.vault.manifest import MANIFEST_NAME, read_manifest


async def refusals(gateway: Rig, cell: FakeCell, saved: Saved, path: str, load_optimizer: bool = True) -> list[str]:
    """What a load in place and a model made from the checkpoint fail with; neither has reached the cell."""
    before, loads = dict(vars(cell.slots.models[saved.model])), cell.count(LoadState)
    in_place = gateway.scheduler.submit("alice", saved.model, None, load(path, load_optimizer))
    as_model = gateway.scheduler.submit_create("alice", gateway.session(), 0, create_from(path, load_optimizer))
    kinds = [await failed(in_place), await failed(as_model)]
    assert cell.count(LoadState) == loads
    assert vars(cell.slots.models[saved.model]) == before
    assert gateway.scheduler.model("alice", saved.model).state == "ready"
    assert gateway.scheduler.model("alice", as_model.model_id).state == "failed"
    assert in_place.error is not None
    return [*kinds, in_place.error.message]


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "http://example.org/x",
        "file:///etc/passwd",
        "org/repo",
        "tinker://m/weights/../../x",
        "tinker://m/weights/a/b",
        "tinker://m/weights/",
        "tinker://m/weights/..",
        "tinker://../weights/x",
        "tinker://m/external_weights/x",
        "tinker://m/weights/x\0",
        "tinker://m/weights/x%2f..%2fy",
        "",
    ],
)
async def test_what_is_no_address_of_a_checkpoint_is_refused(tmp_path: Path, path: str) -> None:
    async with rig_with_cell(tmp_path) as (gateway, cell):
        saved = await one_saved(gateway)
        assert (await refusals(gateway, cell, saved, path))[:2] == ["bad_command"] * 2


async def test_a_checkpoint_for_sampling_is_not_for_training(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, cell):
        saved = await one_saved(gateway)
        await succeeded(gateway.scheduler.submit("alice", saved.model, None, save_for_sampler()))
        for path in (path_of(saved.model, kind="sampler_weights"), path_of("m", kind="sampler_weights")):
            *kinds, message = await refusals(gateway, cell, saved, path)
            assert kinds == ["bad_command"] * 2
            assert "sampling" in message


async def test_an_absent_checkpoint_is_not_found(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, cell):
        saved = await one_saved(gateway)
        for path in (path_of(saved.model, "absent"), path_of("no:train:0")):
            assert (await refusals(gateway, cell, saved, path))[:2] == ["checkpoint_not_found"] * 2


async def test_another_tenants_checkpoint_is_as_good_as_absent(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, _):
        saved = await one_saved(gateway)
        theirs = await gateway.model("bob")
        messages = []
        for path in (saved.path, path_of(saved.model, "absent")):
            future = gateway.scheduler.submit("bob", theirs, None, load(path))
            assert await failed(future) == "checkpoint_not_found"
            messages.append((future.error.message if future.error else "").replace(path, "PATH"))
        assert messages[0] == messages[1]
        mine = gateway.scheduler.submit("alice", saved.model, None, load(saved.path))
        await succeeded(mine)


async def test_an_expired_checkpoint_is_as_good_as_absent(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, cell):
        saved = await one_saved(gateway)
        assert read_manifest(saved.version).expires is None
        late = datetime.now(UTC) + timedelta(hours=1)
        saved.rewrite(expires=late.isoformat().replace("+00:00", "Z"))
        await succeeded(gateway.scheduler.submit("alice", saved.model, None, load(saved.path)))
        saved.rewrite(expires="2020-01-01T00:00:00Z")
        assert (await refusals(gateway, cell, saved, saved.path))[:2] == ["checkpoint_not_found"] * 2
        assert await gateway.scheduler.catalog.list("alice") == []


async def test_other_base_weights_of_the_same_shape_are_refused(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, cell):
        saved = await one_saved(gateway)
        saved.rewrite(base_digest="f" * 32)
        *kinds, message = await refusals(gateway, cell, saved, saved.path)
        assert kinds == ["checkpoint_incompatible"] * 2
        assert "base" in message


@pytest.mark.parametrize(
    ("other", "field"),
    [
        (create(rank=8), "rank"),
        (create(train_attn=False), "train_attn"),
        (create(train_mlp=False), "train_mlp"),
        (create(train_unembed=False), "train_unembed"),
    ],
    ids=["rank", "train_attn", "train_mlp", "train_unembed"],
)
async def test_a_load_in_place_of_another_shape_names_the_field(tmp_path: Path, other: object, field: str) -> None:
    async with rig_with_cell(tmp_path) as (gateway, cell):
        saved = await one_saved(gateway)
        made = gateway.scheduler.submit_create("alice", gateway.session(), 0, other)  # type: ignore[arg-type]
        refused = gateway.scheduler.submit("alice", made.model_id, 1, load(saved.path))
        assert await failed(refused) == "checkpoint_incompatible"
        assert refused.error is not None
        assert field in refused.error.message
        assert cell.count(LoadState) == 0
        await succeeded(gateway.scheduler.submit("alice", made.model_id, 2, forward_backward()))


async def test_a_rank_this_cell_does_not_take_is_refused(tmp_path: Path) -> None:
    async with rig(tmp_path) as gateway:
        with gateway.cell():
            saved = await one_saved(gateway)
    async with rig_with_cell(tmp_path, max_lora_rank=2) as (gateway, _):
        made = gateway.scheduler.submit_create("alice", gateway.session(), 0, create_from(saved.path))
        assert await failed(made) == "bad_command"


async def test_an_optimizer_that_is_not_there_cannot_be_asked_for(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path, no_save_optim=True) as (gateway, cell):
        saved = await one_saved(gateway)
        assert not read_manifest(saved.version).has_optimizer
        assert (await refusals(gateway, cell, saved, saved.path))[:2] == ["no_optimizer_state"] * 2
        loaded = await succeeded(gateway.scheduler.submit("alice", saved.model, None, load(saved.path, False)))
        assert (loaded.optimizer_restored, loaded.reason) == (False, "not_requested")


@pytest.mark.parametrize("damage", ["flipped", "empty", "missing", "cut shard", "missing shard", "random"])
async def test_a_damaged_checkpoint_names_the_file(tmp_path: Path, damage: str) -> None:
    async with rig_with_cell(tmp_path) as (gateway, cell):
        saved = await one_saved(gateway)
        await succeeded(gateway.scheduler.submit("alice", saved.model, None, save("good")))
        manifest, shard = saved.version / MANIFEST_NAME, saved.version / "rank00000.safetensors"
        match damage:
            case "flipped":
                raw = manifest.read_bytes()
                manifest.write_bytes(raw.replace(b'"step": 1', b'"step": 2'))
            case "empty":
                manifest.write_bytes(b"")
            case "missing":
                manifest.unlink()
            case "random":
                manifest.write_bytes(bytes(range(256)))
            case "cut shard":
                shard.write_bytes(shard.read_bytes()[:-1])
            case "missing shard":
                shard.unlink()
        *kinds, message = await refusals(gateway, cell, saved, saved.path)
        assert kinds == ["checkpoint_corrupt"] * 2
        assert ("rank00000.safetensors" if "shard" in damage else MANIFEST_NAME) in message
        assert str(tmp_path) not in message
        # Others get the answer for what does not exist, the owner's other checkpoint loads.
        stranger = gateway.scheduler.submit_create("bob", gateway.session("bob"), 0, create_from(saved.path))
        assert await failed(stranger) == "checkpoint_not_found"
        listed = await gateway.scheduler.catalog.list("alice")
        assert [entry.address.name for entry in listed] == ["good"]
        await succeeded(gateway.scheduler.submit("alice", saved.model, None, load(path_of(saved.model, "good"))))


async def test_an_unknown_format_version_is_told_apart_from_damage(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, cell):
        saved = await one_saved(gateway)
        saved.rewrite(format_version=99)
        assert (await refusals(gateway, cell, saved, saved.path))[:2] == ["checkpoint_incompatible"] * 2
