"""Megatron's names by their components, and the shapes they must have: one table, agreed on with the adapter's own."""

from __future__ import annotations

import pytest

from tests.trainer_cell.checkpoint.formats.states import EVERYTHING
from trainer_cell.checkpoint.formats.errors import Incompatible
from trainer_cell.checkpoint.formats.foreign import features_of, shapes_of
from trainer_cell.checkpoint.formats.megatron_names import megatron_name, parse, parse_all, slot_free
from trainer_cell.training.adapter_names import pair_names
from trainer_cell.training.model_shape import ModelShape

QKV = "decoder.layers.7.self_attention.linear_qkv"


@pytest.mark.parametrize(
    "name",
    [
        f"module.module.{QKV}.adapters.12.linear_in.weight",
        f"module.{QKV}.adapter.linear_in.weight",
        f"{QKV}.adapters.0.linear_in",
        f"{QKV}.adapter.linear_in",
    ],
)
def test_slots_prefixes_and_endings_make_no_difference(name: str) -> None:
    place = parse(name)
    assert (place.layer, place.module, place.short, place.half) == (7, "linear_qkv", ("q", "k", "v"), "A")
    assert place.is_fused


@pytest.mark.parametrize(
    "name",
    [
        f"{QKV}.adapters.0.adapters.1.linear_in.weight",
        f"{QKV}.adapter.adapters.0.linear_in.weight",
        f"{QKV}.adapters.linear_in.weight",
        f"{QKV}.adapters.x.linear_in.weight",
        f"{QKV}.linear_in.weight",
        f"{QKV}.myadapter.linear_in.weight",
        "adapters.0.decoder.layers.0.adapter.linear_in.weight",
    ],
)
def test_a_name_without_exactly_one_slot_is_refused(name: str) -> None:
    with pytest.raises(Incompatible, match="not exactly one component"):
        slot_free(name)


@pytest.mark.parametrize(
    "name",
    [
        f"{QKV}.adapter.linear_out.bias",
        f"{QKV}.adapter.weight",
        f"{QKV}.adapter.adapter_o.linear_in.weight",
        f"{QKV}.adapter.q.linear_in.weight",
        "decoder.layers.0.mlp.linear_qkv.adapter.linear_in.weight",
        "decoder.layers.0.mlp.experts.linear_fc1.adapter.linear_in.weight",
        "decoder.layers.0.output_layer.adapter.linear_in.weight",
        "output.adapter.linear_in.weight",
        "embedding.word_embeddings.adapter.linear_in.weight",
        "decoder.adapter.linear_in.weight",
    ],
)
def test_a_layer_that_takes_no_adapter_here_is_refused_by_name(name: str) -> None:
    with pytest.raises(Incompatible, match=name.replace(".", r"\.")):
        parse(name)


def test_two_names_of_one_tensor_are_refused() -> None:
    names = [f"{QKV}.adapters.0.linear_in.weight", f"{QKV}.adapters.1.linear_in.weight"]
    with pytest.raises(Incompatible, match="names of the same tensor"):
        parse_all(names)
    assert len(parse_all([names[0], names[1].replace("layers.7", "layers.8")])) == 2


def test_what_an_export_names_is_read_back_as_the_same_tensor(shape: ModelShape) -> None:
    written = {
        megatron_name(projection, half): name
        for projection in features_of(shape)
        for half, name in zip("AB", pair_names(projection), strict=True)
    }
    assert len(written) == len(shapes_of(features_of(shape), EVERYTHING))
    for megatron, name in written.items():
        place = parse(megatron)
        [projection] = place.projections(place.layer)
        assert pair_names(projection)["AB".index(place.half)] == name
        assert not place.is_fused
