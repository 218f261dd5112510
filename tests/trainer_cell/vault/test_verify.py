"""What is read back is what was written, or it is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.trainer_cell.vault.checkpoints import ADDRESS, EPOCH, LORA_A, WHOLE, contents, manifest_of, new_vault, save
from tests.trainer_cell.vault.disks import FailingDisk
from trainer_cell.vault import shard_file
from trainer_cell.vault.cover import index_problems
from trainer_cell.vault.errors import CheckpointDamaged, StorageFailed, TensorsDisagree
from trainer_cell.vault.layout import CheckpointAddress, Vault
from trainer_cell.vault.manifest import FileRecord, Manifest, PieceRecord, TensorRecord, digest_of_chunks, read_manifest
from trainer_cell.vault.publish import begin, finish
from trainer_cell.vault.region import Region, copy_overlap
from trainer_cell.vault.shard_file import TensorPiece, write_shard
from trainer_cell.vault.verify import Wanted, read_tensors, verify_version

Changed = Callable[[dict[str, Wanted]], None]


def saved(root: Path) -> tuple[Path, Manifest]:
    vault = new_vault(root)
    directory = vault.version_dir(save(vault))
    return directory, read_manifest(directory)


@pytest.mark.parametrize("chunk_size", [8 << 20, 64, 7])
def test_everything_is_read_back_whatever_the_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_size: int
) -> None:
    monkeypatch.setattr(shard_file, "CHUNK_SIZE", chunk_size)
    directory, manifest = saved(tmp_path)
    assert read_tensors(directory, manifest, WHOLE) == contents(1)
    assert verify_version(directory) == []


def cut(shape: tuple[int, ...], axis: int | None, bounds: list[int]) -> list[tuple[int, tuple[int, ...]]]:
    """Offset and shape of each part of a tensor cut at `bounds` along `axis`."""
    if axis is None:
        return [(0, shape)]
    ends = [0, *bounds, shape[axis]]
    return [(start, (*shape[:axis], end - start, *shape[axis + 1 :])) for start, end in pairwise(ends)]


@st.composite
def shardings(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[int | None, list[tuple[int, tuple[int, ...]]]]:
    axis = draw(st.sampled_from([None, *range(len(shape))]))
    inner = st.integers(1, shape[axis] - 1) if axis is not None and shape[axis] > 1 else st.nothing()
    bounds = sorted(draw(st.sets(inner, max_size=3))) if axis is not None and shape[axis] > 1 else []
    return axis, cut(shape, axis, bounds)


def part_of(data: bytes, shape: tuple[int, ...], axis: int | None, offset: int, local: tuple[int, ...]) -> bytes:
    target = bytearray(len(data))
    whole, part = Region.cut(shape, None, 0), Region.cut(local, axis, offset)
    copy_overlap(memoryview(data), whole, memoryview(target), part, 4)
    size = 4
    for length in local:
        size *= length
    return bytes(target[:size])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_sharding_is_read_under_any_other(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, data: st.DataObject
) -> None:
    monkeypatch.setattr(shard_file, "CHUNK_SIZE", data.draw(st.sampled_from([1 << 20, 50, 13])))
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    size = 4
    for length in shape:
        size *= length
    whole = data.draw(st.binary(min_size=size, max_size=size))
    axis, parts = data.draw(shardings(shape))
    vault = new_vault(tmp_path_factory.mktemp("vault"))
    staging = begin(vault, ADDRESS, False, 0, EPOCH)
    shards = [
        write_shard(
            staging,
            f"rank{rank}.safetensors",
            [TensorPiece("t", "F32", local, shape, axis, offset, part_of(whole, shape, axis, offset, local))],
        )
        for rank, (offset, local) in enumerate(parts)
    ]
    directory = vault.version_dir(finish(vault, staging, manifest_of(shards), False))
    wanted_axis, wanted_parts = data.draw(shardings(shape))
    for offset, local in wanted_parts:
        wanted = {"t": Wanted(wanted_axis, offset, local, shape, "F32")}
        read = read_tensors(directory, read_manifest(directory), wanted)
        assert bytes(read["t"]) == part_of(whole, shape, wanted_axis, offset, local)


def _without(key: str) -> Changed:
    return lambda wanted: wanted.__delitem__(key)


def _with(key: str, **fields: Any) -> Changed:
    return lambda wanted: wanted.update({key: Wanted(**fields)})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_without(f"{LORA_A}/master"), f"tensor {LORA_A}/master is unexpected"),
        (_with("more", axis=None, offset=0, shape=(1,)), "tensor more is missing"),
        (_with(f"{LORA_A}/master", axis=None, offset=0, shape=(5, 3)), r"master has shape \[3, 5\], not \[5, 3\]"),
        (_with(f"{LORA_A}/master", axis=0, offset=2, shape=(2, 5)), r"has no part \[2, 5\] at 2 on axis 0"),
        (_with(f"{LORA_A}/master", axis=1, offset=0, shape=(2, 5)), r"has no part \[2, 5\] at 0 on axis 1"),
        (_with(f"{LORA_A}/master", axis=7, offset=0, shape=(3, 5)), "on axis 7"),
        (_with(f"{LORA_A}/master", axis=0, offset=-1, shape=(1, 5)), "at -1 on axis 0"),
        (_with(f"{LORA_A}/master", axis=0, offset=0, shape=(1, 5), global_shape=(4, 5)), r"not \[4, 5\]"),
        (_with(f"{LORA_A}/weight", axis=None, offset=0, shape=(3, 5), dtype="F32"), "weight is BF16, not F32"),
    ],
)
def test_tensors_that_are_not_those_expected_are_refused_by_name(tmp_path: Path, change: Changed, named: str) -> None:
    directory, manifest = saved(tmp_path)
    wanted = dict(WHOLE)
    change(wanted)
    with pytest.raises(TensorsDisagree, match=named):
        read_tensors(directory, manifest, wanted)


def test_all_offending_tensors_are_listed(tmp_path: Path) -> None:
    directory, manifest = saved(tmp_path)
    renamed = {f"{key}x": part for key, part in WHOLE.items()}
    with pytest.raises(TensorsDisagree) as refusal:
        read_tensors(directory, manifest, renamed)
    assert all(f"tensor {key} is unexpected" in str(refusal.value) for key in WHOLE)
    assert all(f"tensor {key} is missing" in str(refusal.value) for key in renamed)


def test_tensors_deliberately_ignored_are_not_read(tmp_path: Path) -> None:
    directory, manifest = saved(tmp_path)
    weight = f"{LORA_A}/weight"
    left = set(WHOLE) - {weight}
    assert read_tensors(directory, manifest, {weight: WHOLE[weight]}, left) == {weight: contents(1)[weight]}
    with pytest.raises(TensorsDisagree, match="unexpected"):
        read_tensors(directory, manifest, {weight: WHOLE[weight]}, left - {f"{LORA_A}/exp_avg"})


def test_a_checkpoint_without_tensors_and_a_model_without_are_told_apart(tmp_path: Path) -> None:
    directory, manifest = saved(tmp_path)
    with pytest.raises(TensorsDisagree, match="the model has none"):
        read_tensors(directory, manifest, {})
    assert read_tensors(directory, manifest, {}, WHOLE) == {}  # a rank may hold no part of a model that has some
    with pytest.raises(CheckpointDamaged, match="the checkpoint holds none"):
        read_tensors(directory, msgspec.structs.replace(manifest, tensors={}), {})


def record(size: int) -> FileRecord:
    return FileRecord(size, 1 << 20, digest_of_chunks(("0" * 32,)), ("0" * 32,))


def index(
    shape: tuple[int, ...], *pieces: tuple[int | None, int, tuple[int, ...], int, int], size: int = 0
) -> Manifest:
    records = tuple(PieceRecord("f.safetensors", *piece) for piece in pieces)
    end = size or max((piece.end for piece in records), default=64)
    return manifest_of([], files={"f.safetensors": record(end)}, tensors={"t": TensorRecord("F32", shape, records)})


@pytest.mark.parametrize(
    ("manifest", "named"),
    [
        (index((2, 2)), "tensor t: no piece"),
        (index((2, 2), (None, 0, (2, 2), 64, 80), (None, 0, (2, 2), 80, 96)), "tensor t: it is stored whole more than"),
        (index((2, 2), (None, 0, (1, 2), 64, 72)), "tensor t: .* is not the whole"),
        (index((2, 2), (0, 0, (1, 2), 64, 72)), "tensor t: axis 0 is stored up to 1 of 2"),
        (index((2, 2), (0, 1, (1, 2), 64, 72)), "tensor t: axis 0 between 0 and 1 is not stored"),
        (index((2, 2), (0, 0, (2, 2), 64, 80), (0, 1, (1, 2), 80, 88)), "axis 0 between 1 and 2 is stored twice"),
        (index((2, 2), (0, 0, (1, 2), 64, 72), (1, 0, (2, 1), 72, 80)), "tensor t: its pieces are cut along different"),
        (index((2, 2), (2, 0, (2, 2), 64, 80)), "tensor t: axis 2"),
        (index((2, 2), (0, 0, (2, 1), 64, 72)), "tensor t: .* is not a part of"),
        (index((2, 2), (None, 0, (2, 2), 64, 79)), "tensor t: 15 bytes"),
        (index((-1, 2), (None, 0, (-1, 2), 64, 56), size=64), "tensor t: shape .* negative"),
        (index((2, 2), (None, 0, (2, 2), 0, 16)), "file f.safetensors: tensors start at 0"),
        (index((2, 2), (None, 0, (2, 2), 64, 80), size=81), "file f.safetensors: tensors end at 80, the file at 81"),
        (index((2, 2), (0, 0, (1, 2), 64, 72), (0, 1, (1, 2), 73, 81)), "between 72 and 73 belong to no tensor"),
        (index((2, 2), (0, 0, (1, 2), 64, 72), (0, 1, (1, 2), 71, 79)), "between 71 and 72 belong to two tensors"),
        (manifest_of([], files={"f.safetensors": record(64)}, tensors={}), "holds none"),
        (manifest_of([], files={"f.safetensors": record(0)}, tensors={}), "must be positive"),
        (manifest_of([], files={"f.safetensors": FileRecord(9, 4, "", ("0" * 32,))}, tensors={}), "1 digests for 9"),
        (manifest_of([], files={"f.safetensors": FileRecord(9, 9, "", ("x" * 32,))}, tensors={}), "not a digest"),
        (manifest_of([], files={"f.safetensors": FileRecord(9, 9, "", ("0" * 32,))}, tensors={}), "digest does not"),
    ],
)  # fmt: skip
def test_an_index_that_does_not_add_up_is_refused_by_name(tmp_path: Path, manifest: Manifest, named: str) -> None:
    with pytest.raises(AssertionError, match=named):
        assert not "\n".join(index_problems(manifest))


def test_an_index_that_adds_up_is_not_refused() -> None:
    assert list(index_problems(index((2, 2), (0, 0, (1, 2), 64, 72), (0, 1, (1, 2), 72, 80)))) == []


def test_a_header_that_contradicts_the_index_is_found_although_every_digest_matches(tmp_path: Path) -> None:
    vault = new_vault(tmp_path)
    staging = begin(vault, ADDRESS, False, 0, EPOCH)
    twins = [TensorPiece(key, "F32", (2,), (2,), None, 0, bytes([at]) * 8) for at, key in enumerate("ab")]
    shard = write_shard(staging, "f.safetensors", twins)
    swapped = {"a": shard.index["b"], "b": shard.index["a"]}
    version = finish(vault, staging, manifest_of([shard], tensors=swapped), False)
    assert verify_version(vault.version_dir(version)) == [
        "file f.safetensors: the safetensors header does not agree with the manifest"
    ]


def test_shards_swapped_between_checkpoints_are_refused(tmp_path: Path) -> None:
    vault = new_vault(tmp_path)
    other = CheckpointAddress(ADDRESS.model_id, "weights", "other")
    first, second = vault.version_dir(save(vault)), vault.version_dir(save(vault, other, seed=2))
    name = "rank00000.safetensors"
    (first / name).rename(first / "kept.safetensors")
    (second / name).rename(first / name)
    (first / "kept.safetensors").rename(second / name)
    for directory in (first, second):
        assert verify_version(directory) == [
            f"file {name}: bytes 0 to {(first / name).stat().st_size} do not match their digest"
        ]
        with pytest.raises(CheckpointDamaged, match=name):
            read_tensors(directory, read_manifest(directory), WHOLE)


def test_a_disk_that_cannot_read_is_a_storage_failure_and_not_damage(tmp_path: Path) -> None:
    directory, manifest = saved(tmp_path)
    with pytest.raises(StorageFailed, match="EIO"):
        read_tensors(directory, manifest, WHOLE, disk=FailingDisk(6))
    assert any("EIO" in problem for problem in verify_version(directory, disk=FailingDisk(6)))


def test_a_version_that_is_not_there_is_told(tmp_path: Path) -> None:
    vault = Vault(tmp_path)
    assert verify_version(vault.root / "nowhere") == ["nowhere: manifest.json is missing"]


def test_an_index_found_sound_is_not_taken_for_sound_with_other_files(tmp_path: Path) -> None:
    _, manifest = saved(tmp_path)
    for _ in range(2):
        assert list(index_problems(manifest)) == []
        name, record = next(iter(manifest.files.items()))
        longer = msgspec.structs.replace(record, size=record.size + 1)
        other = msgspec.structs.replace(manifest, files={**manifest.files, name: longer})
        assert [problem for problem in index_problems(other) if name in problem]
        fewer = msgspec.structs.replace(manifest, files={name: record})
        assert list(index_problems(fewer))
