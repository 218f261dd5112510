"""A real cell over damaged checkpoints: every one is refused and named, the slot keeps its bits, the cell serves on."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.service.forgery import forge
from tests.trainer_cell import odd_base
from tests.trainer_cell.checkpoint.test_resharding import DATA
from tests.trainer_cell.client import Client, new_id
from tests.trainer_cell.running_cell import RunningCell, running_cell
from trainer_cell.protocol.commands import AdapterSpec, FreeModel
from trainer_cell.protocol.errors import ErrorKind
from trainer_cell.protocol.outcomes import Failed, ModelFreed
from trainer_cell.vault.errors import CheckpointDamaged
from trainer_cell.vault.layout import CheckpointAddress, Vault

pytestmark = pytest.mark.cell

# The smallest there is: two tensors, in one file of less than 2 KiB beside its manifest.
SPEC = AdapterSpec(1, 2.0, train_attn=False, train_mlp=False, train_unembed=True)
SHARD = "rank00000.safetensors"
LORA_A, LORA_B = (f"base_model.model.lm_head.lora_{letter}.weight" for letter in "AB")
FLIPS, FEW_FLIPS = 400, 20
LENGTHS, FEW_LENGTHS = 150, 10


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damage") / "checkpoints"


@pytest.fixture(scope="module")
def cell(root: Path) -> Iterator[RunningCell]:
    with running_cell(odd_base.write(root.parent / "base"), root) as running:
        yield running
        assert running.stop() == [0]


class Attacked:
    """A model that has trained, and a checkpoint of two steps ago that it is told to load while that is damaged."""

    def __init__(self, cell: RunningCell, root: Path, name: str) -> None:
        self.cell, self.root = cell, root
        self.model, self.twin = (Client(cell, f"{name}{which}:train:0", SPEC) for which in ("", "-twin"))
        for one in (self.model, self.twin):
            one.create(seed=3)
            one.train(DATA[0])
        self.model.save(root, "old")
        self.address = CheckpointAddress(self.model.model_id, "weights", "old")
        for one in (self.model, self.twin):
            one.train(DATA[1])
        self.before = self.model.save(root, "before")
        self.directory = self.directory_of(self.address)

    def directory_of(self, address: CheckpointAddress) -> Path:
        version = Vault(self.root).resolve(address)
        assert version is not None
        return self.root / version

    def load(self, load_optimizer: bool = True, address: CheckpointAddress | None = None) -> Failed:
        """A load that must fail, into the model and into one that is not there."""
        version = str(self.directory_of(address or self.address).relative_to(self.root))
        command = self.model.load_command(version, load_optimizer)
        failed = self.cell.execute(command)
        assert isinstance(failed, Failed), "a damaged checkpoint was loaded"
        absent = self.cell.execute(msgspec.structs.replace(command, model_id="absent:train:0"))
        assert isinstance(absent, Failed)
        assert (absent.kind, absent.message) == (failed.kind, failed.message)
        return failed

    def check_unharmed(self) -> None:
        """The slot is bit-identical, its next step is that of a model that nobody tried to load into, and the
        checkpoint, mended, loads."""
        assert self.model.save(self.root, "after").same_as(self.before)
        assert self.model.train(DATA[2]).logprobs == self.twin.train(DATA[2]).logprobs
        assert self.model.save(self.root, "next").same_as(self.twin.save(self.root, "next"))
        assert not self.cell.do(FreeModel(new_id(), "absent:train:0"), ModelFreed).was_resident
        loaded = self.model.load(str(self.directory_of(self.address).relative_to(self.root)))
        assert (loaded.step, loaded.optimizer_restored) == (1, True)


@contextmanager
def content(path: Path, raw: bytes) -> Iterator[None]:
    before = path.read_bytes()
    path.write_bytes(raw)
    yield
    path.write_bytes(before)


def sampled(size: int, count: int) -> list[int]:
    """The first, the last and others between, the same in every run."""
    inner = random.Random(size).sample(range(1, size - 1), min(count, size) - 2)
    return [0, *sorted(inner), size - 1]


def sweep_flips(attacked: Attacked, count: int) -> None:
    for path in sorted(attacked.directory.iterdir()):
        raw = path.read_bytes()
        for at in sampled(len(raw), count):
            flipped = raw[:at] + bytes([raw[at] ^ (1 << at % 8)]) + raw[at + 1 :]
            with content(path, flipped):
                failed = attacked.load(load_optimizer=True)
                assert failed.kind is ErrorKind.CHECKPOINT_CORRUPT
                assert path.name in failed.message
    attacked.check_unharmed()


def sweep_lengths(attacked: Attacked, count: int) -> None:
    for path in sorted(attacked.directory.iterdir()):
        raw = path.read_bytes()
        for length in sampled(len(raw), count):
            with content(path, raw[:length]):
                failed = attacked.load(load_optimizer=False)
                assert failed.kind is ErrorKind.CHECKPOINT_CORRUPT
                assert path.name in failed.message
    attacked.check_unharmed()


def test_a_flipped_bit_is_refused_wherever_it_is(cell: RunningCell, root: Path) -> None:
    sweep_flips(Attacked(cell, root, "flips"), FEW_FLIPS)


@pytest.mark.full
def test_flipped_bits_are_refused_in_hundreds_of_places(cell: RunningCell, root: Path) -> None:
    sweep_flips(Attacked(cell, root, "many-flips"), FLIPS)


def test_a_file_cut_short_is_refused_whatever_its_length(cell: RunningCell, root: Path) -> None:
    sweep_lengths(Attacked(cell, root, "lengths"), FEW_LENGTHS)


@pytest.mark.full
def test_files_cut_short_are_refused_at_hundreds_of_lengths(cell: RunningCell, root: Path) -> None:
    sweep_lengths(Attacked(cell, root, "many-lengths"), LENGTHS)


def test_a_public_link_with_any_byte_changed_or_cut_off_stands_for_nothing(cell: RunningCell, root: Path) -> None:
    attacked = Attacked(cell, root, "link")
    vault = Vault(root)
    public = vault.public_path(attacked.address)
    target = public.readlink()
    text = str(target)
    changed = [text[:at] + chr(ord(text[at]) ^ 1) + text[at + 1 :] for at in range(len(text))]
    for wrong in (*changed, *(text[:length] for length in range(1, len(text)))):
        public.unlink()
        public.symlink_to(wrong)
        version = resolved(vault, attacked.address)
        if version is not None:
            # Its id reads as that of another version, which is not there.
            failed = cell.execute(attacked.model.load_command(version))
            assert isinstance(failed, Failed)
            assert failed.kind is ErrorKind.CHECKPOINT_CORRUPT
    public.unlink()
    public.symlink_to(target)
    attacked.check_unharmed()


def resolved(vault: Vault, address: CheckpointAddress) -> str | None:
    """None when the link is found to be damaged."""
    try:
        version = vault.resolve(address)
    except CheckpointDamaged:
        return None
    assert version is not None, "the name is taken"
    return version


Damage = Callable[[Attacked], CheckpointAddress | None]


def _missing(name: str) -> Damage:
    return lambda attacked: (attacked.directory / name).unlink()


def _renamed(attacked: Attacked) -> None:
    (attacked.directory / SHARD).rename(attacked.directory / "rank00001.safetensors")


def _extra(attacked: Attacked) -> None:
    shutil.copy(attacked.directory / SHARD, attacked.directory / "rank00001.safetensors")


def _from(name: str, source: str) -> Damage:
    """A file out of another checkpoint of the same sizes: of another step, or of another model and tenant."""

    def damage(attacked: Attacked) -> None:
        owner = attacked.model if source == "before" else attacked.twin
        owner.save(attacked.root, source)
        shutil.copy(
            attacked.directory_of(CheckpointAddress(owner.model_id, "weights", source)) / name, attacked.directory
        )

    return damage


def _directory(attacked: Attacked) -> None:
    (attacked.directory / "manifest.json").unlink()
    (attacked.directory / "manifest.json").mkdir()


def _zeros(name: str) -> Damage:
    return lambda attacked: (
        (attacked.directory / name).write_bytes(bytes((attacked.directory / name).stat().st_size)) and None
    )


def _forged(
    change: Callable[[str, torch.Tensor], torch.Tensor | None] = lambda _, tensor: tensor, **facts: Any
) -> Damage:
    def damage(attacked: Attacked) -> CheckpointAddress:
        return CheckpointAddress.parse(forge(attacked.root, attacked.address.uri, "forged", change, **facts))

    return damage


def _without(key: str) -> Callable[[str, torch.Tensor], torch.Tensor | None]:
    return lambda of, tensor: None if of == key else tensor


def _nan(key: str) -> Callable[[str, torch.Tensor], torch.Tensor]:
    return lambda of, tensor: tensor.fill_(float("nan")) if of == key else tensor


CORRUPT, INCOMPATIBLE = ErrorKind.CHECKPOINT_CORRUPT, ErrorKind.CHECKPOINT_INCOMPATIBLE
DAMAGES: dict[str, tuple[Damage, ErrorKind, str]] = {
    "no shard": (_missing(SHARD), CORRUPT, SHARD),
    "no manifest": (_missing("manifest.json"), CORRUPT, "manifest.json"),
    "a renamed shard": (_renamed, CORRUPT, SHARD),
    "an extra shard": (_extra, CORRUPT, "rank00001.safetensors"),
    "the shard of another step": (_from(SHARD, "before"), CORRUPT, SHARD),
    "another's shard": (_from(SHARD, "other"), CORRUPT, SHARD),
    "another's manifest": (_from("manifest.json", "other"), CORRUPT, SHARD),
    "a manifest that is a directory": (_directory, CORRUPT, "manifest.json"),
    "zeros for a manifest": (_zeros("manifest.json"), CORRUPT, "manifest.json"),
    "zeros for a shard": (_zeros(SHARD), CORRUPT, SHARD),
    "other base weights": (_forged(base_digest="0" * 32), INCOMPATIBLE, "other base weights"),
    "another rank": (_forged(adapter=msgspec.structs.replace(SPEC, rank=2)), INCOMPATIBLE, "rank"),
    "other targets": (_forged(adapter=msgspec.structs.replace(SPEC, train_mlp=True)), INCOMPATIBLE, "train_mlp"),
    "another alpha": (_forged(adapter=msgspec.structs.replace(SPEC, alpha=4.0)), INCOMPATIBLE, "alpha"),
    "no optimizer": (
        _forged(lambda key, tensor: tensor if key.endswith("/weight") else None, has_optimizer=False),
        ErrorKind.NO_OPTIMIZER_STATE,
        "no optimizer state",
    ),
    "half an optimizer": (_forged(_without(f"{LORA_B}/exp_avg_sq")), CORRUPT, f"{LORA_B}/exp_avg_sq is missing"),
    "moments it says it has not": (_forged(has_optimizer=False), ErrorKind.NO_OPTIMIZER_STATE, "no optimizer"),
    "a tensor too few": (_forged(_without(f"{LORA_A}/weight")), CORRUPT, f"{LORA_A}/weight is missing"),
    "a tensor of another shape": (
        _forged(lambda key, tensor: tensor[:, :-1] if key == f"{LORA_A}/weight" else tensor),
        CORRUPT,
        f"{LORA_A}/weight has shape",
    ),
    "a tensor of another dtype": (
        _forged(lambda key, tensor: tensor.bfloat16() if key == f"{LORA_A}/exp_avg" else tensor),
        CORRUPT,
        f"{LORA_A}/exp_avg is BF16",
    ),
    "NaN": (_forged(_nan(f"{LORA_B}/exp_avg")), ErrorKind.NON_FINITE_STATE, f"{LORA_B}/exp_avg"),
    "NaN, said so": (_forged(non_finite=True), ErrorKind.NON_FINITE_STATE, "NaN"),
}


@pytest.mark.parametrize("fault", DAMAGES)
def test_a_checkpoint_with(cell: RunningCell, root: Path, fault: str) -> None:
    damage, kind, named = DAMAGES[fault]
    attacked = Attacked(cell, root, f"{list(DAMAGES).index(fault)}")
    whole = shutil.copytree(attacked.directory, root.parent / f"whole-{attacked.directory.name}")
    address = damage(attacked)
    failed = attacked.load(address=address)
    assert (failed.kind, named in failed.message) == (kind, True), failed
    shutil.rmtree(attacked.directory)
    whole.rename(attacked.directory)
    attacked.check_unharmed()
