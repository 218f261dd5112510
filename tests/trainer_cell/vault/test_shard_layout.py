"""A shard is laid out before it is written, and its image in memory is the file, byte for byte."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import safetensors

from tests.trainer_cell.vault.checkpoints import ADDRESS, EPOCH, contents, load, manifest_of, new_vault, whole_pieces
from trainer_cell.vault.errors import CheckpointDamaged
from trainer_cell.vault.manifest import ITEM_BYTES, MANIFEST_NAME, TensorDType
from trainer_cell.vault.publish import begin, finish
from trainer_cell.vault.shard_file import TensorPiece, write_image, write_shard
from trainer_cell.vault.shard_layout import PAGE_BYTES, KeptMemory, PieceSpec, ShardLayout, image_memory, lay_out
from trainer_cell.vault.tensor_index import index_of

NAME, OTHER = "rank00000.safetensors", "rank00001.safetensors"


def piece(key: str, dtype: TensorDType, count: int, seed: int = 0) -> TensorPiece:
    data = random.Random(seed).randbytes(count * ITEM_BYTES[dtype])
    return TensorPiece(key, dtype, (count,), (count,), None, 0, data)


# Below and above what is written unbuffered; with and without a last part of a page.
PIECES = {
    "small": [piece("a", "BF16", 3, 1), piece("b", "F32", 5, 2), piece("c", "I64", 1, 3)],
    "whole pages": [piece("a", "F32", 1 << 18, 1), piece("b", "F32", 1 << 19, 2), piece("c", "BF16", 1 << 17, 3)],
    "a part of a page": [piece("a", "BF16", (1 << 20) + 1, 1), piece("b", "F32", (1 << 18) + 7, 2)],
    "more than a chunk": [piece("a", "F32", 1 << 20, 1), piece("b", "F32", (5 << 18) + 3, 2)],
}


def image_of(layout: ShardLayout, pieces: list[TensorPiece]) -> memoryview:
    """The padding is not zero: it must not reach the file."""
    image = image_memory(layout.image_bytes)
    image[:] = b"\xff" * image.nbytes
    image[: len(layout.header)] = layout.header
    for one in pieces:
        stored = layout.index[one.key].pieces[0]
        image[stored.begin : stored.end] = one.data
    return image


@pytest.mark.parametrize("which", PIECES)
def test_an_image_is_written_as_the_very_file_that_its_pieces_make(tmp_path: Path, which: str) -> None:
    pieces = PIECES[which]
    vault = new_vault(tmp_path)
    ours, theirs = (begin(vault, ADDRESS, False, 0, EPOCH) for _ in range(2))
    written = write_shard(ours, NAME, pieces)
    layout = lay_out(NAME, pieces)
    record = write_image(theirs, layout, image_of(layout, pieces))
    raw = (theirs.directory / NAME).read_bytes()
    assert raw == (ours.directory / NAME).read_bytes()
    assert (record, dict(layout.index)) == (written.record, written.index)
    assert len(raw) == layout.size == record.size
    read: dict[str, Any] = dict(safetensors.deserialize(raw))  # type: ignore[no-untyped-call]
    assert {key: bytes(tensor["data"]) for key, tensor in read.items()} == {one.key: one.data for one in pieces}


def test_a_large_file_is_whole_pages_where_its_tensors_let_it_be(tmp_path: Path) -> None:
    assert lay_out(NAME, PIECES["whole pages"]).size % PAGE_BYTES == 0
    assert lay_out(NAME, PIECES["a part of a page"]).size % PAGE_BYTES != 0
    assert lay_out(NAME, PIECES["small"]).size < PAGE_BYTES
    assert all(len(lay_out(NAME, pieces).header) % 64 == 0 for pieces in PIECES.values())


def test_the_order_given_is_kept_among_elements_of_one_width() -> None:
    specs = [
        PieceSpec(key, dtype, (2,), (2,), None, 0)
        for key, dtype in (("z", "BF16"), ("m", "F32"), ("a", "BF16"), ("k", "F32"))
    ]
    assert [spec.key for spec in lay_out(NAME, specs).specs] == ["m", "k", "z", "a"]


def test_an_image_that_is_too_short_is_refused_before_a_file_is_made(tmp_path: Path) -> None:
    staging = begin(new_vault(tmp_path), ADDRESS, False, 0, EPOCH)
    layout = lay_out(NAME, PIECES["small"])
    with pytest.raises(ValueError, match="image"):
        write_image(staging, layout, image_memory(layout.image_bytes)[:-1])
    assert list(staging.directory.iterdir()) == []


def test_an_index_that_is_encoded_once_gives_the_same_manifest_as_one_that_is_not(tmp_path: Path) -> None:
    vault = new_vault(tmp_path)
    layouts = [lay_out(name, whole_pieces(1)[at::2]) for at, name in enumerate((NAME, OTHER))]
    index = index_of(layouts)
    texts = []
    for known in (None, index):
        staging = begin(vault, ADDRESS, True, 0, EPOCH)
        written = [write_shard(staging, name, whole_pieces(1)[at::2]) for at, name in enumerate((NAME, OTHER))]
        manifest = msgspec.structs.replace(manifest_of(written), tensors=index.tensors)
        version = finish(vault, staging, manifest, True, known)
        texts.append((vault.version_dir(version) / MANIFEST_NAME).read_bytes())
        assert load(vault) == contents(1)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("fault", ["other tensors", "another size", "a file less", "a wrong digest"])
def test_a_manifest_that_is_not_of_its_index_is_refused(tmp_path: Path, fault: str) -> None:
    vault = new_vault(tmp_path)
    staging = begin(vault, ADDRESS, False, 0, EPOCH)
    written = write_shard(staging, NAME, whole_pieces(1))
    index = index_of([lay_out(NAME, whole_pieces(1))])
    manifest = msgspec.structs.replace(manifest_of([written]), tensors=index.tensors)
    if fault == "other tensors":
        manifest = msgspec.structs.replace(manifest, tensors=dict(list(index.tensors.items())[1:]))
    elif fault == "another size":
        index = with_sizes(index, {NAME: written.record.size + 1})
    elif fault == "a file less":
        index = with_sizes(index, {NAME: written.record.size, OTHER: 1})
    else:
        record = msgspec.structs.replace(written.record, digest="0" * 32)
        manifest = msgspec.structs.replace(manifest, files={NAME: record})
    with pytest.raises(CheckpointDamaged):
        finish(vault, staging, manifest, False, index)
    assert load(vault) is None
    assert not staging.directory.exists()


def with_sizes(index: Any, sizes: dict[str, int]) -> Any:
    return type(index)(index.tensors, index.text, sizes)


def test_an_index_needs_every_element_once() -> None:
    upper = PieceSpec("a", "F32", (2, 2), (3, 2), 0, 0)
    lower = PieceSpec("a", "F32", (1, 2), (3, 2), 0, 2)
    assert list(index_of([lay_out(NAME, [upper]), lay_out(OTHER, [lower])]).tensors) == ["a"]
    assert index_of(
        [lay_out(NAME, [upper]), lay_out(OTHER, [lower]), lay_out("none.safetensors", [])]
    ).sizes.keys() == {
        NAME,
        OTHER,
    }
    with pytest.raises(ValueError, match="axis 0 is stored up to 2 of 3"):
        index_of([lay_out(NAME, [upper])])
    with pytest.raises(ValueError, match="stored twice"):
        index_of([lay_out(NAME, [upper]), lay_out(OTHER, [upper])])


def test_memory_is_kept_until_more_is_needed() -> None:
    kept = KeptMemory()
    first = kept(10)
    first[:3] = b"abc"
    assert bytes(kept(PAGE_BYTES)[:3]) == b"abc"
    assert kept(PAGE_BYTES + 1).nbytes == 2 * PAGE_BYTES
