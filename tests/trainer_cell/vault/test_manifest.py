"""The manifest's text is fixed, tells its own damage, and is read strictly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash

from tests.trainer_cell.vault.checkpoints import manifest_of
from trainer_cell.vault.errors import CheckpointDamaged, UnsupportedFormat
from trainer_cell.vault.manifest import (
    FORMAT_VERSION,
    FileRecord,
    Manifest,
    PieceRecord,
    TensorRecord,
    decode_manifest,
    digest_of_chunks,
    encode_manifest,
    read_manifest,
)
from trainer_cell.vault.shard_file import WrittenShard

PATH = Path("manifest.json")
GOLDEN = Path(__file__).with_name("golden_manifest.json")


def example() -> Manifest:
    digests = ("0" * 31 + "1",)
    record = FileRecord(76, 8 << 20, digest_of_chunks(digests), digests)
    index = {
        "a.lora_A.weight/weight": TensorRecord("F32", (1, 3), (PieceRecord("r.safetensors", 0, 0, (1, 3), 64, 76),))
    }
    return manifest_of([WrittenShard("r.safetensors", record, index)])


def signed(fields: dict[str, Any]) -> bytes:
    """Any fields as a manifest whose digest is right."""
    body = json.dumps(fields).encode()[:-1]
    return body + f',\n  "manifest_digest": "{xxhash.xxh3_128_hexdigest(body)}"\n}}\n'.encode()


def fields_of(manifest: Manifest) -> dict[str, Any]:
    fields = json.loads(encode_manifest(manifest))
    del fields["manifest_digest"]
    return fields  # type: ignore[no-any-return]


def test_a_manifest_reads_back_as_it_was() -> None:
    read = decode_manifest(encode_manifest(example()), PATH)
    assert msgspec.structs.replace(read, manifest_digest="") == example()
    assert len(read.manifest_digest) == 32


def test_the_text_is_the_one_of_format_version_1() -> None:
    assert FORMAT_VERSION == 1
    assert encode_manifest(example()) == GOLDEN.read_bytes()


def test_the_text_is_json_for_anybody() -> None:
    fields = json.loads(encode_manifest(example()))
    assert list(fields) == [field for field in Manifest.__struct_fields__ if field != "scheduler"]
    assert fields["user_metadata"] == {"note": 'quotes " and ünïcode'}


def test_an_unknown_format_version_is_refused_as_such() -> None:
    with pytest.raises(UnsupportedFormat, match="version 2"):
        decode_manifest(signed({**fields_of(example()), "format_version": 2, "new_field": 1}), PATH)
    with pytest.raises(UnsupportedFormat, match="version 2"):
        decode_manifest(signed({"format_version": 2}), PATH)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"step": "4"}, "step"),
        ({"step": None}, "step"),
        ({"kind": "optimizer"}, "kind"),
        ({"surprise": 1}, "surprise"),
        ({"adapter": {}}, "adapter"),
        ({"tensors": {"a": {"dtype": "F64", "shape": [], "pieces": []}}}, "dtype"),
        ({"format_version": True}, "format_version"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointDamaged, match=named):
        decode_manifest(signed({**fields_of(example()), **change}), PATH)


def test_a_scheduler_is_kept_to_the_last_bit_and_is_not_in_the_text_where_there_is_none() -> None:
    """So that manifests from before there were any read as they did."""
    state: dict[str, float | int | str | bool] = {"max_lr": 0.1 + 0.2, "num_steps": 3, "lr_decay_style": "linear"}
    with_one = msgspec.structs.replace(example(), has_scheduler=True, scheduler=state)
    assert decode_manifest(encode_manifest(with_one), PATH).scheduler == state
    assert b'"scheduler"' not in encode_manifest(example())
    assert decode_manifest(encode_manifest(example()), PATH).scheduler is None


@pytest.mark.parametrize(("has", "state"), [(True, None), (False, {"num_steps": 3})])
def test_a_scheduler_is_there_exactly_when_the_manifest_says_so(has: bool, state: dict[str, Any] | None) -> None:
    fields = {**fields_of(example()), "has_scheduler": has, "scheduler": state}
    with pytest.raises(CheckpointDamaged, match="has_scheduler"):
        decode_manifest(signed(fields), PATH)
    with pytest.raises(ValueError, match="has_scheduler"):
        encode_manifest(msgspec.structs.replace(example(), has_scheduler=has, scheduler=state))


REQUIRED = [field for field in Manifest.__struct_fields__[:-1] if field != "scheduler"]


@pytest.mark.parametrize("missing", REQUIRED)
def test_a_missing_field_is_named(missing: str) -> None:
    fields = fields_of(example())
    del fields[missing]
    with pytest.raises(CheckpointDamaged, match=missing):
        decode_manifest(signed(fields), PATH)


@pytest.mark.parametrize("name", ["../x.safetensors", "/x.safetensors", "a/b.safetensors", "x.pt", ".safetensors", ""])
def test_a_file_that_could_be_elsewhere_is_refused(name: str) -> None:
    record = example().files["r.safetensors"]
    raw = encode_manifest(msgspec.structs.replace(example(), files={name: record}))
    with pytest.raises(CheckpointDamaged, match="not a shard's name"):
        decode_manifest(raw, PATH)


@pytest.mark.parametrize("raw", [b"", b"{}", b"\0" * 3000, b"[" * 100_000, encode_manifest(example()) + b"\n"])
def test_what_is_no_manifest_is_damaged(raw: bytes) -> None:
    with pytest.raises(CheckpointDamaged):
        decode_manifest(raw, PATH)


def test_a_bottomless_manifest_is_damaged() -> None:
    body = b'{"surprise": ' + b"[" * 100_000
    raw = body + f',\n  "manifest_digest": "{xxhash.xxh3_128_hexdigest(body)}"\n}}\n'.encode()
    with pytest.raises(CheckpointDamaged):
        decode_manifest(raw, PATH)


def test_values_that_json_does_not_keep_are_not_written() -> None:
    with pytest.raises(ValueError, match="format"):
        encode_manifest(
            msgspec.structs.replace(example(), adapter=msgspec.structs.replace(example().adapter, alpha=float("nan")))
        )
    with pytest.raises(ValueError, match="surrogates"):
        encode_manifest(msgspec.structs.replace(example(), user_metadata={"x": "\ud800"}))


def test_a_missing_manifest_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointDamaged, match=r"manifest\.json is missing"):
        read_manifest(tmp_path)
    with pytest.raises(CheckpointDamaged, match=r"manifest\.json is missing"):
        read_manifest(tmp_path / "nowhere")


def test_a_manifest_that_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(encode_manifest(example()))
    (tmp_path / "manifest.json").symlink_to("elsewhere")
    with pytest.raises(CheckpointDamaged, match="not a regular file"):
        read_manifest(tmp_path)


def test_checkpoints_of_one_shape_share_their_tensors_and_others_do_not(tmp_path: Path) -> None:
    raw = encode_manifest(example())
    other = encode_manifest(msgspec.structs.replace(example(), step=5))
    read = decode_manifest(raw, PATH)
    assert decode_manifest(other, PATH).tensors is read.tensors
    assert decode_manifest(other, PATH).step == 5
    renamed = msgspec.structs.replace(example(), tensors={"b": example().tensors["a.lora_A.weight/weight"]})
    assert list(decode_manifest(encode_manifest(renamed), PATH).tensors) == ["b"]


def test_tensors_that_break_the_format_are_refused_also_where_the_digest_is_right() -> None:
    body = encode_manifest(example()).rpartition(b',\n  "manifest_digest"')[0]
    for wrong in (body.replace(b'"dtype":"F32"', b'"dtype":"F31"'), body.replace(b'"shape":[1,3]', b'"shape":[1,3}')):
        assert wrong != body
        raw = wrong + f',\n  "manifest_digest": "{xxhash.xxh3_128_hexdigest(wrong)}"\n}}\n'.encode()
        with pytest.raises(CheckpointDamaged, match="does not read"):
            decode_manifest(raw, PATH)
