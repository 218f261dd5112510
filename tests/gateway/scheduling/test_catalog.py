"""The catalog reads files, and shows each tenant its own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from gateway.scheduling.catalog import Catalog
from gateway.scheduling.errors import CheckpointUnreadable, InvalidRequest, UnknownCheckpoint
from gateway.scheduling.identity import tenant_digester
from tests.gateway.scheduling.rig import (
    SECRET,
    forward_backward,
    load,
    optim_step,
    path_of,
    rig_with_cell,
    save,
    save_for_sampler,
    succeeded,
)
from trainer_cell.protocol.commands import SaveState
from trainer_cell.vault.layout import Vault
from trainer_cell.vault.manifest import MANIFEST_NAME
from trainer_cell.vault.retention_record import NO_RECORD


async def saved_by_two(root: Path) -> tuple[Vault, str, str]:
    """Alice's model with checkpoints `9`, `10` and one for sampling; Bob's with `9`. Nothing runs any more."""
    async with rig_with_cell(root) as (gateway, _):
        hers, his = await gateway.model("alice"), await gateway.model("bob")
        await succeeded(gateway.submit(hers, save("9"), save("10"), save_for_sampler("9"))[-1])
        await succeeded(gateway.submit(his, save("9"), tenant="bob")[-1])
        return gateway.vault, hers, his


def catalog(vault: Vault) -> Catalog:
    return Catalog(vault, tenant_digester(SECRET))


async def test_checkpoints_are_listed_from_the_files_alone_newest_first(tmp_path: Path) -> None:
    vault, hers, his = await saved_by_two(tmp_path)
    listed = await catalog(vault).list("alice")
    assert [entry.uri for entry in listed] == [
        path_of(hers, "9", "sampler_weights"),
        path_of(hers, "10"),
        path_of(hers, "9"),
    ]
    assert [entry.uri for entry in await catalog(vault).list("bob")] == [path_of(his, "9")]
    assert await catalog(vault).list("alice", his) == []
    assert await catalog(vault).list("carol") == []
    (run,) = await catalog(vault).runs("alice")
    assert (run.model_id, list(run.checkpoints)) == (hers, listed)
    assert all(entry.size_bytes > 0 and entry.created.tzinfo for entry in listed)


async def test_another_secret_makes_other_owners(tmp_path: Path) -> None:
    vault, _, _ = await saved_by_two(tmp_path)
    assert await Catalog(vault, tenant_digester(b"other")).list("alice") == []


async def test_finding_and_deleting_are_for_the_owner(tmp_path: Path) -> None:
    vault, hers, _ = await saved_by_two(tmp_path)
    books = catalog(vault)
    path = path_of(hers, "9")
    for attempt in (books.find, books.delete):
        with pytest.raises(UnknownCheckpoint) as theirs:
            await attempt("bob", path)
        with pytest.raises(UnknownCheckpoint) as absent:
            await attempt("bob", path_of(hers, "absent"))
        assert theirs.value.message.replace("9", "absent").endswith(absent.value.message[-20:])
        with pytest.raises(InvalidRequest):
            await attempt("alice", "/etc/passwd")
    assert (await books.find("alice", path)).uri == path
    await books.delete("alice", path)
    with pytest.raises(UnknownCheckpoint):
        await books.delete("alice", path)
    assert [entry.address.name for entry in await books.list("alice")] == ["9", "10"]


async def test_a_damaged_checkpoint_is_not_listed_told_to_its_owner_and_deletable(tmp_path: Path) -> None:
    vault, hers, _ = await saved_by_two(tmp_path)
    books = catalog(vault)
    entry = await books.find("alice", path_of(hers, "9"))
    (vault.version_dir(entry.version) / MANIFEST_NAME).write_bytes(b"{}")
    assert entry.uri not in [listed.uri for listed in await books.list("alice")]
    with pytest.raises(CheckpointUnreadable):
        await books.find("alice", entry.uri)
    for attempt in (books.find, books.delete):
        with pytest.raises(UnknownCheckpoint):
            await attempt("bob", entry.uri)
    await books.delete("alice", entry.uri)
    assert not vault.version_dir(entry.version).exists()


async def test_the_only_checkpoint_of_a_forgotten_model_is_damaged_for_who_knows_it_and_nobodys_to_delete(
    tmp_path: Path,
) -> None:
    vault, _, his = await saved_by_two(tmp_path)
    books = catalog(vault)
    entry = await books.find("bob", path_of(his, "9"))
    (vault.version_dir(entry.version) / MANIFEST_NAME).write_bytes(b"{}")
    with pytest.raises(CheckpointUnreadable):
        await books.find("bob", entry.uri)
    with pytest.raises(UnknownCheckpoint):
        await books.delete("bob", entry.uri)
    books.known_owner = {his: "bob"}.get
    with pytest.raises(UnknownCheckpoint):
        await books.find("alice", entry.uri)
    await books.delete("bob", entry.uri)


async def test_strays_and_a_version_deleted_by_hand_harm_nothing(tmp_path: Path) -> None:
    vault, hers, _ = await saved_by_two(tmp_path)
    books = catalog(vault)
    place = vault.model_dir(hers) / "weights"
    (place / "lost+found").mkdir()
    (place / ".tmp-123").mkdir()
    (place / "file").write_text("stray")
    (place / "dangling").symlink_to("../.versions/nowhere")
    gone = await books.find("alice", path_of(hers, "9"))
    shutil.rmtree(vault.version_dir(gone.version))
    assert [entry.address.name for entry in await books.list("alice")] == ["9", "10"]
    for name in ("9", "file", "dangling"):
        with pytest.raises((CheckpointUnreadable, UnknownCheckpoint)):
            await books.find("alice", path_of(hers, name))


async def test_what_a_delete_left_because_it_was_being_read_goes_with_the_next_one(tmp_path: Path) -> None:
    vault, hers, _ = await saved_by_two(tmp_path)
    books = catalog(vault)
    entry = await books.find("alice", path_of(hers, "9"))
    lease = vault.lease(entry.version)
    assert lease is not None
    with lease:
        await books.delete("alice", entry.uri)
        assert vault.version_dir(entry.version).exists()
    for tenant in ("bob", "alice"):
        assert vault.version_dir(entry.version).exists()
        with pytest.raises(UnknownCheckpoint):
            await books.delete(tenant, entry.uri)
    assert not vault.version_dir(entry.version).exists()


async def test_a_recovery_snapshot_is_its_owners_to_load_and_nobodys_to_change(tmp_path: Path) -> None:
    async with rig_with_cell(tmp_path) as (gateway, cell):
        model = await gateway.model("alice")
        await succeeded(gateway.submit(model, forward_backward(), optim_step(), first=1)[-1])
        books = gateway.scheduler.catalog
        digest = books.tenant_digest("alice")
        created = "2026-01-01T00:00:00Z"
        snapshot = SaveState("s", model, "latest", "recovery", True, True, digest, created, None, {"turn": "2"})
        cell.slots.execute(snapshot, lambda said: None)
        path = path_of(model, "latest", "recovery")
        assert await books.list("alice") == []
        assert await books.saves.used_bytes("alice") == 0
        for change in (books.delete, books.pin, books.unpin, lambda tenant, of: books.set_ttl(tenant, of, 7200)):
            with pytest.raises(InvalidRequest, match="service's own"):
                await change("alice", path)
        entry = await books.find("alice", path)
        assert (entry.uri, entry.record) == (path, NO_RECORD)
        with pytest.raises(UnknownCheckpoint):
            await books.find("bob", path)
        loaded = await succeeded(gateway.submit(model, load(path), first=3)[-1])
        assert (loaded.step, loaded.optimizer_restored) == (1, True)
