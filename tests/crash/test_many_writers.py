"""Many writers at once: nobody's files are anybody else's, and of two for one free name exactly one wins."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest

from tests.crash.injection import Driver, running_driver
from tests.crash.workload import ADDRESS, NEW, OLD, check_states, pieces, save, state_of, states
from tests.crash.wrong_orders import reference_save
from tests.trainer_cell.vault.checkpoints import leftovers
from tests.trainer_cell.vault.disks import UnsyncedDisk
from trainer_cell.vault.errors import AlreadyThere, NotThere
from trainer_cell.vault.layout import CheckpointAddress, Vault
from trainer_cell.vault.manifest import MANIFEST_NAME, read_manifest
from trainer_cell.vault.publish import begin
from trainer_cell.vault.shard_file import write_shard
from trainer_cell.vault.verify import verify_version

TENANTS, ROUNDS = 16, 50
T = TypeVar("T")


def new_vault(root: Path) -> Vault:
    vault = Vault(root, UnsyncedDisk())
    vault.create()
    return vault


def test_sixteen_tenants_save_at_once_and_every_manifest_parses_and_every_digest_matches(scratch: Path) -> None:
    vault = new_vault(scratch / "root")
    addresses = [CheckpointAddress(f"s-{tenant}:train:0", "weights", "same") for tenant in range(TENANTS)]
    start = threading.Barrier(TENANTS)

    def repeat(tenant: int) -> None:
        for number in range(ROUNDS):
            start.wait(60)
            save(vault, tenant * 1000 + number, addresses[tenant], overwrite=True, shards=1 + number % 2)

    with ThreadPoolExecutor(TENANTS) as pool:
        list(pool.map(repeat, range(TENANTS)))
    assert [state_of(vault, address) for address in addresses] == [
        tenant * 1000 + ROUNDS - 1 for tenant in range(TENANTS)
    ]
    made = list(vault.root.glob("*/.versions/*"))
    assert len(made) == TENANTS * ROUNDS
    seeds = set()
    for version in made:
        assert verify_version(version) == []
        seeds.add(read_manifest(version).iteration)
    assert seeds == {tenant * 1000 + number for tenant in range(TENANTS) for number in range(ROUNDS)}
    assert leftovers(vault) == []


class _Overtaken(UnsyncedDisk):
    """Another save of the same name comes between the shards of a save and its manifest."""

    def __init__(self, other: Callable[[], object]) -> None:
        self._other: Callable[[], object] | None = other

    def call(self, operation: str, path: Path, act: Callable[[], T]) -> T:
        if (operation, path.name) == ("create", MANIFEST_NAME) and self._other is not None:
            other, self._other = self._other, None
            other()
        return super().call(operation, path, act)


def test_a_save_overtaken_by_another_of_its_name_is_whole_all_the_same(scratch: Path) -> None:
    vault = new_vault(scratch / "root")
    save(Vault(vault.root, _Overtaken(lambda: save(vault, OLD, overwrite=True))), NEW, overwrite=True)
    check_states(vault, states([NEW], others=()))


def test_one_temporary_name_for_all_is_caught(scratch: Path) -> None:
    vault = new_vault(scratch / "root")
    with pytest.raises(NotThere):
        reference_save(Vault(vault.root, _Overtaken(lambda: reference_save(vault, OLD))), NEW)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Driver, Driver]]:
    first, second = (tmp_path_factory.mktemp("driver") / "warm" for _ in range(2))
    with running_driver(first) as one, running_driver(second) as other:
        yield one, other


def both(two: tuple[Driver, Driver], root: Path, addresses: list[str], overwrite: bool) -> list[dict[str, object]]:
    """What two processes are told that save at once, seeds 11 and 12."""
    job = {"action": "save", "root": str(root), "shards": 2, "overwrite": overwrite}
    for number, driver in enumerate(two):
        driver.start({**job, "seed": 11 + number, "address": addresses[number]})
    for driver in two:
        driver.go()
    return [driver.answer() for driver in two]


@pytest.mark.parametrize("rounds", [10, pytest.param(100, marks=pytest.mark.full)])
def test_two_processes_save_one_name_in_two_models_and_both_succeed(
    two: tuple[Driver, Driver], scratch: Path, rounds: int
) -> None:
    vault = new_vault(scratch / "root")
    addresses = [CheckpointAddress(f"s-{number}:train:0", "weights", "same") for number in (1, 2)]
    for _ in range(rounds):
        said = both(two, vault.root, [address.uri for address in addresses], overwrite=True)
        assert all("done" in answer for answer in said), said
        assert [state_of(vault, address) for address in addresses] == [11, 12]


@pytest.mark.parametrize("rounds", [10, pytest.param(100, marks=pytest.mark.full)])
def test_of_two_processes_that_save_one_free_name_exactly_one_wins(
    two: tuple[Driver, Driver], scratch: Path, rounds: int
) -> None:
    for number in range(rounds):
        vault = new_vault(scratch / str(number))
        said = both(two, vault.root, [ADDRESS.uri] * 2, overwrite=False)
        assert sorted(answer.get("failed", "done") for answer in said) == ["CheckpointExists", "done"]  # type: ignore[type-var]
        winner = 11 if "done" in said[0] else 12
        check_states(vault, states([winner], others=()))
        assert len(list(vault.root.glob("*/.versions/*"))) == 1
        assert leftovers(vault) == []


def test_of_two_processes_that_overwrite_one_name_both_succeed_and_one_is_there(
    two: tuple[Driver, Driver], scratch: Path
) -> None:
    for number in range(10):
        vault = new_vault(scratch / str(number))
        said = both(two, vault.root, [ADDRESS.uri] * 2, overwrite=True)
        assert all("done" in answer for answer in said), said
        check_states(vault, states([11, 12], others=()))


def test_a_file_of_an_attempt_has_one_writer(scratch: Path) -> None:
    vault = new_vault(scratch / "root")
    staging = begin(vault, ADDRESS, False, 0, "E")
    write_shard(staging, "rank00000.safetensors", pieces(OLD))
    before = (staging.directory / "rank00000.safetensors").read_bytes()
    with pytest.raises(AlreadyThere):
        write_shard(staging, "rank00000.safetensors", pieces(NEW))
    assert (staging.directory / "rank00000.safetensors").read_bytes() == before
