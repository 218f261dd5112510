"""A checkpoint root in which everything that a start-up has to settle lies at once."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from tests.trainer_cell.vault.checkpoints import ADDRESS, new_vault, save
from tests.trainer_cell.vault.disks import Crash, UnsyncedDisk
from trainer_cell.vault.deletion import doom
from trainer_cell.vault.layout import CheckpointAddress, Vault, VersionName
from trainer_cell.vault.retention_record import NO_RECORD, RetentionRecord, write_records
from trainer_cell.vault.ulid import ULID_PATTERN

FAILED = "c-failed"
MODEL = ADDRESS.model_id


def named(name: str, model_id: str = MODEL) -> CheckpointAddress:
    return CheckpointAddress(model_id, "weights", name)


def version_of(told: str) -> VersionName:
    version = VersionName.parse(told.rpartition("/")[2])
    assert version is not None
    return version


class _CrashBeforePoint(UnsyncedDisk):
    """Dies when the public name, or the link that is to become it, would be made."""

    def symlink(self, target: str, path: Path) -> None:
        raise Crash("symlink")


def freeze(vault: Vault, address: CheckpointAddress, *, overwrite: bool = False, **facts: object) -> VersionName:
    """A save that dies between freeze and point."""
    before = set(vault.versions_dir(address.model_id).glob("*"))
    try:
        save(Vault(vault.root, _CrashBeforePoint()), address, overwrite=overwrite, **facts)  # type: ignore[arg-type]
    except Crash:
        (made,) = set(vault.versions_dir(address.model_id).glob("*")) - before
        return version_of(str(made))
    raise AssertionError("the save did not point")


def damage(vault: Vault, told: str) -> None:
    (vault.version_dir(told) / "rank00001.safetensors").unlink()


def everything(root: Path) -> Vault:
    """One model with a name for each case, a second one with a dangling name alone, and leftovers in staging."""
    vault = new_vault(root, UnsyncedDisk())
    save(vault, named("kept"), seed=1)
    save(vault, named("replaced"), seed=1)
    save(vault, named("replaced"), seed=2, overwrite=True)
    freeze(vault, named("frozen"), seed=3)
    save(vault, named("frozen-over"), seed=1)
    freeze(vault, named("frozen-over"), seed=2, overwrite=True)
    freeze(vault, named("failed"), seed=4, command_id=FAILED)
    for name, seeds in (("bad", (1, 2)), ("hopeless", (1,))):
        for seed in seeds:
            told = save(vault, named(name), seed=seed, overwrite=True)
        damage(vault, told)
    pinned = save(vault, named("pinned"), seed=1)
    newer = save(vault, named("pinned"), seed=2, overwrite=True)
    damage(vault, newer)
    write_records(vault, MODEL, {version_of(newer): RetentionRecord(pinned=True)})
    shutil.rmtree(vault.version_dir(save(vault, named("missing"), seed=5)))
    vault.public_path(named("foreign")).symlink_to("../../somewhere")
    for name, is_unlinked in (("doomed", False), ("half-deleted", True)):
        versions = [version_of(save(vault, named(name), seed=seed, overwrite=True)) for seed in (1, 2)]
        doom(vault, named(name), dict.fromkeys(versions, NO_RECORD), "deleted")
        if is_unlinked:
            vault.public_path(named(name)).unlink()
    shutil.copytree(vault.version_dir(pinned), vault.public_path(named("plain")))
    (vault.retention_dir(MODEL) / ".new.01M8PF99MZ5P65BR6PAJSDETTH").write_text("{")
    vault.public_path(named("x")).parent.joinpath(".point.DEAD.01M8PF99MZ5P65BR6PAJSDETTH").symlink_to("nowhere")
    (vault.staging_root / "DEAD.01M8PF99MZ5P65BR6PAJSDETTH").mkdir()
    (vault.root / "lonely~train~0" / "weights").mkdir(parents=True)
    (vault.root / "lonely~train~0" / "weights" / "n").symlink_to("../.versions/weights.n.01M8PF99MZ5P65BR6PAJSDETTH")
    return vault


def copy_of(vault: Vault, root: Path, disk: UnsyncedDisk) -> Vault:
    shutil.copytree(vault.root, root, symlinks=True)
    return Vault(root, disk)


def state(root: Path) -> dict[str, str]:
    """Every file, directory and link with what it holds, locks aside; the ids of moves are left out."""
    found = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if name.startswith(".quarantine/"):
            name = re.sub(rf"\.{ULID_PATTERN}$", "", name) if path.parent.parent.name == ".quarantine" else ""
        if path.is_symlink():
            found[name] = f"-> {path.readlink()}"
        elif path.is_file() and not name.endswith(".lock") and name:
            found[name] = path.read_bytes().hex()
        elif name:
            found[name] = "directory"
    return {name: held for name, held in found.items() if not name.endswith(".lock")}
