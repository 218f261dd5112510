"""What a process does to a vault while it is being killed, and what must hold afterwards.

A checkpoint's whole content follows from a number, its seed, which its manifest says too: so a reader can tell which
save it has read, and whether anything of another is mixed into it.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path

from tests.trainer_cell.vault.checkpoints import EPOCH, leftovers, manifest_of
from tests.trainer_cell.vault.disks import UnsyncedDisk
from trainer_cell.vault import manifest as manifests
from trainer_cell.vault import shard_file
from trainer_cell.vault.deletion import delete_checkpoint
from trainer_cell.vault.errors import StorageFailed, VaultError
from trainer_cell.vault.layout import CheckpointAddress, Vault
from trainer_cell.vault.listing import list_checkpoints
from trainer_cell.vault.manifest import ITEM_BYTES, TensorDType, read_manifest
from trainer_cell.vault.publish import abandon, begin, finish, sweep_staging
from trainer_cell.vault.quarantine import list_quarantined
from trainer_cell.vault.recovery import settle_publish
from trainer_cell.vault.shard_file import TensorPiece, write_shard
from trainer_cell.vault.startup import OutcomeOf, recover
from trainer_cell.vault.verify import Wanted, read_tensors, verify_version

ADDRESS = CheckpointAddress("s-1:train:0", "weights", "n")
BYSTANDER = CheckpointAddress("s-2:train:0", "sampler_weights", "other")
OLD, NEW, NEXT, BYSTANDING = 1, 2, 3, 4
COMMAND = "c-lost"
NEXT_EPOCH = "EPOCH2"

_LORA = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
_SHAPES: dict[str, tuple[TensorDType, tuple[int, ...]]] = {
    f"{_LORA}/weight": ("BF16", (32, 40)),
    f"{_LORA}/master": ("F32", (32, 40)),
    f"{_LORA}/exp_avg": ("F32", (32, 40)),
    f"{_LORA}/exp_avg_sq": ("F32", (32, 40)),
}
NUM_BYTES = sum(prod(shape) * ITEM_BYTES[dtype] for dtype, shape in _SHAPES.values())
_WHOLE = {key: Wanted(None, 0, shape, shape, dtype) for key, (dtype, shape) in _SHAPES.items()}

State = int | None


class Violation(AssertionError):
    """Something a fault must never lead to; the controls expect it."""


def demand(holds: bool, what: str) -> None:
    if not holds:
        raise Violation(what)


@contextmanager
def small_chunks() -> Iterator[None]:
    """Inside, 18 KB are several chunks. A file's record says what its chunks are, so readers need not be told."""
    before = manifests.CHUNK_SIZE
    manifests.CHUNK_SIZE = shard_file.CHUNK_SIZE = 4096
    try:
        yield
    finally:
        manifests.CHUNK_SIZE = shard_file.CHUNK_SIZE = before


@lru_cache(maxsize=4096)
def contents(seed: int) -> Mapping[str, bytes]:
    chance = random.Random(seed)
    return {key: chance.randbytes(prod(shape) * ITEM_BYTES[dtype]) for key, (dtype, shape) in _SHAPES.items()}


def pieces(seed: int) -> list[TensorPiece]:
    return [
        TensorPiece(key, dtype, shape, shape, None, 0, contents(seed)[key]) for key, (dtype, shape) in _SHAPES.items()
    ]


def save(
    vault: Vault,
    seed: int,
    address: CheckpointAddress = ADDRESS,
    *,
    overwrite: bool = False,
    shards: int = 1,
    command: str = COMMAND,
    epoch: str = EPOCH,
    num_bytes: int = NUM_BYTES,
) -> str:
    """As a cell of `shards` ranks does it; the version, once it is acknowledged."""
    of_slot = pieces(seed)
    staging = begin(vault, address, overwrite, num_bytes, epoch)
    try:
        written = [write_shard(staging, f"rank{rank:05d}.safetensors", of_slot[rank::shards]) for rank in range(shards)]
    except StorageFailed:
        abandon(staging)
        raise
    return finish(vault, staging, manifest_of(written, address, iteration=seed, command_id=command), overwrite)


def state_of(vault: Vault, address: CheckpointAddress = ADDRESS) -> State:
    """The seed of what a load of `address` reads, None when the name is free; anything else is a violation."""
    try:
        version = vault.resolve(address)
        if version is None:
            return None
        directory = vault.version_dir(version)
        problems = verify_version(directory)
        demand(not problems, f"{address.uri} is published and damaged: {problems}")
        manifest = read_manifest(directory)
        read = read_tensors(directory, manifest, _WHOLE)
    except VaultError as error:
        raise Violation(f"{address.uri} cannot be loaded: {error}") from error
    demand(read == contents(manifest.iteration), f"{address.uri} mixes {manifest.iteration} with something else")
    return manifest.iteration


@dataclass(frozen=True)
class Pending:
    """A save that nobody has answered for."""

    address: CheckpointAddress
    seed: int
    overwrite: bool
    command: str = COMMAND


Allowed = Mapping[CheckpointAddress, frozenset[State]]


def check_recovery(
    root: Path, allowed: Allowed, pending: Pending | None = None, boots: bool = False, failed: Collection[str] = ()
) -> dict[CheckpointAddress, State]:
    """Recover from what a fault has left, and go on. What each name held before the next save.

    boots: by a start-up of the gateway, otherwise by that of another cell. failed: the commands of which a failure is
    recorded. Raises `Violation`.
    """
    vault = Vault(root, UnsyncedDisk())
    try:
        vault.create()
        found = check_states(vault, allowed)
        if boots:
            found = _start_up(vault, allowed, failed)
        elif pending is not None:
            _settle(vault, pending, found)
        _sweep(vault)
        demand({at: state_of(vault, at) for at in allowed} == found, "recovery has changed what a name holds")
        _start(vault, allowed, found, failed)
        _check_list(vault, found)
        _go_on(vault, found)
    except VaultError as error:
        raise Violation(f"recovery does not work: {type(error).__name__}: {error}") from error
    return found


def check_states(vault: Vault, allowed: Allowed) -> dict[CheckpointAddress, State]:
    found = {address: state_of(vault, address) for address in allowed}
    for address, state in found.items():
        demand(
            state in allowed[address], f"{address.uri} holds {state}, not one of {sorted(map(str, allowed[address]))}"
        )
    for version in versions(vault):
        problems = verify_version(version)
        demand(not problems, f"version {version.name} is frozen and damaged: {problems}")
    return found


def versions(vault: Vault) -> list[Path]:
    return sorted(vault.root.glob("*/.versions/*"))


def _settle(vault: Vault, pending: Pending, found: dict[CheckpointAddress, State]) -> None:
    settled = settle_publish(vault, pending.address, pending.command, pending.overwrite, NEXT_EPOCH)
    state = state_of(vault, pending.address)
    if settled is None:
        demand(state == found[pending.address], "a settlement that found nothing has changed the name")
    else:
        demand(state == pending.seed, f"a settlement says that {pending.seed} is there, and {state} is")
        found[pending.address] = state


def _start_up(vault: Vault, allowed: Allowed, failed: Collection[str]) -> dict[CheckpointAddress, State]:
    for _ in range(2):
        report = recover(vault, _outcomes(failed))
        demand(report.errors == (), f"start-up: {report.errors}")
    demand(report.findings == (), f"a second start-up finds {report.findings}")
    demand(list(list_quarantined(vault)) == [], "a start-up has put something into quarantine")
    return check_states(vault, allowed)


def _outcomes(failed: Collection[str]) -> OutcomeOf:
    return lambda command_id: "failed" if command_id in failed else None


def _sweep(vault: Vault) -> None:
    sweep_staging(vault)
    demand(leftovers(vault) == [], f"the sweep leaves {leftovers(vault)}")
    demand(sweep_staging(vault) == [], "a second sweep finds something")


def _start(vault: Vault, allowed: Allowed, found: dict[CheckpointAddress, State], failed: Collection[str]) -> None:
    """A start-up has only deletions and failed saves to end: a name that was gone stays gone, another keeps what it
    held."""
    report = recover(vault, _outcomes(failed))
    demand(report.errors == (), f"a start-up fails: {report.errors}")
    done = {finding.what for finding in report.findings}
    demand(done <= {"deleted", "collected"}, f"a start-up did more: {report.findings}")
    for address, before in found.items():
        found[address] = state_of(vault, address)
        demand(
            found[address] == before or (found[address] is None and None in allowed[address]),
            f"{address.uri} held {before}, and after a start-up {found[address]}",
        )
    demand(recover(vault).findings == (), "a second start-up finds something")


def _check_list(vault: Vault, found: Mapping[CheckpointAddress, State]) -> None:
    listed = list(list_checkpoints(vault))
    demand([str(entry.problem) for entry in listed if entry.problem] == [], "a listed checkpoint has a problem")
    there = {address for address, state in found.items() if state is not None}
    demand({entry.address for entry in listed} == there, f"listed are {[entry.address.uri for entry in listed]}")


def _go_on(vault: Vault, found: Mapping[CheckpointAddress, State]) -> None:
    """The next save works, touches no other name, and a delete then leaves nothing of the name."""
    address, *others = found
    save(vault, NEXT, address, overwrite=True, shards=2, epoch=NEXT_EPOCH)
    demand(state_of(vault, address) == NEXT, "the next save is not what is loaded")
    demand(delete_checkpoint(vault, address), "a delete does not find what was saved")
    demand([state_of(vault, other) for other in others] == [found[other] for other in others], "a bystander changed")
    kept = [path.name for path in versions(vault) if path.name.startswith(f"{address.kind}.{address.name}.")]
    demand([name for name in kept if address.model_id == ADDRESS.model_id] == [], f"a delete leaves {kept}")
    demand(leftovers(vault) == [], f"a save and a delete leave {leftovers(vault)}")


def prepared(root: Path, overwrite: bool, shards: int = 1, also: Sequence[CheckpointAddress] = (BYSTANDER,)) -> Vault:
    """A vault before the fault: another tenant's checkpoint and, to be overwritten, an old one."""
    vault = Vault(root, UnsyncedDisk())
    vault.create()
    for address in also:
        save(vault, BYSTANDING, address, command="c-other")
    if overwrite:
        save(vault, OLD, shards=shards, command="c-old")
    return vault


def states(target: Sequence[State], others: Sequence[CheckpointAddress] = (BYSTANDER,)) -> Allowed:
    """`target`: what `ADDRESS` may hold; the others must be as `prepared` left them."""
    return {ADDRESS: frozenset(target), **{other: frozenset({BYSTANDING}) for other in others}}
