from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from trainer_cell.protocol.commands import AdapterSpec
from trainer_cell.training.adapter import Adapter, target_modules
from trainer_cell.training.build import Base
from trainer_cell.training.projections import Adapted, Projection

SPEC = AdapterSpec(3, 6.0, train_attn=True, train_mlp=True, train_unembed=True)


class OneRankOfTwo(Adapted):
    """A layer as the first or second of two tensor-parallel ranks has it."""

    def __init__(self, layer: Adapted, rank: int) -> None:
        self.projections = tuple(self._half(projection, rank) for projection in layer.projections)

    @staticmethod
    def _half(projection: Projection, rank: int) -> Projection:
        size = projection.size // 2
        return dataclasses.replace(projection, offset=rank * size, size=size)


def halves(base: Base) -> tuple[Adapter, Adapter]:
    first, second = (
        Adapter(dataclasses.replace(base, adapted=tuple(OneRankOfTwo(layer, rank) for layer in base.adapted)), SPEC)
        for rank in (0, 1)
    )
    return first, second


@pytest.mark.parametrize("switch", ["train_attn", "train_mlp", "train_unembed"])
def test_each_switch_adds_its_projections(base: Base, switch: str) -> None:
    flags = dict.fromkeys(("train_attn", "train_mlp", "train_unembed"), False) | {switch: True}
    spec = AdapterSpec(3, 6.0, **flags)
    kinds = {
        "train_attn": {"q_proj", "k_proj", "v_proj", "o_proj"},
        "train_mlp": {"gate_proj", "up_proj", "down_proj"},
        "train_unembed": {"lm_head"},
    }[switch]
    assert set(target_modules(spec)) == kinds
    names = Adapter(base, spec).parameters
    assert {name.split(".")[-3] for name in names} == kinds
    assert len(names) == (2 if switch == "train_unembed" else 2 * 4 * len(kinds))


def test_names_and_shapes_are_those_of_peft(base: Base) -> None:
    table = Adapter(base, SPEC).table
    prefix = "base_model.model.model.layers.0."
    assert list(table)[:2] == [f"{prefix}self_attn.q_proj.lora_{half}.weight" for half in "AB"]
    assert table[f"{prefix}self_attn.k_proj.lora_B.weight"].global_shape == (32, 3)
    assert table[f"{prefix}mlp.down_proj.lora_A.weight"].global_shape == (3, 160)
    assert table["base_model.model.lm_head.lora_A.weight"].global_shape == (3, 64)
    assert table["base_model.model.lm_head.lora_B.weight"].global_shape == (512, 3)
    assert all(sharding.axis is None for sharding in table.values())


def test_no_adapter_tensor_is_a_parameter_of_the_model(base: Base) -> None:
    adapter = Adapter(base, SPEC)
    with adapter.active():
        assert not any(parameter.requires_grad for parameter in base.model.parameters())


def test_a_fresh_adapter_is_drawn_from_its_seed_and_adds_nothing(base: Base) -> None:
    first, again, other = (Adapter(base, SPEC) for _ in range(3))
    first.initialise(7)
    again.initialise(7)
    other.initialise(8)
    assert torch.equal(first.flat, again.flat)
    assert not torch.equal(first.flat, other.flat)
    drawn = {name: tensor for name, tensor in first.parameters.items() if ".lora_A." in name}
    assert len({float(tensor.detach().flatten()[0]) for tensor in drawn.values()}) == len(drawn)
    for name, tensor in first.parameters.items():
        bound = 1 / math.sqrt(tensor.size(1)) if name in drawn else 0.0
        assert float(tensor.detach().abs().max()) <= bound
        assert float(tensor.detach().abs().max()) >= 0.9 * bound


def test_two_tensor_parallel_ranks_hold_the_pieces_of_the_same_adapter(base: Base) -> None:
    whole, pieces = Adapter(base, SPEC), halves(base)
    for adapter in (whole, *pieces):
        adapter.initialise(7)
        adapter.parameters["base_model.model.lm_head.lora_B.weight"].data.fill_(1.0)
    num_cut = 0
    for name, parameter in whole.parameters.items():
        first, second = (piece.parameters[name] for piece in pieces)
        sharding = pieces[1].table[name]
        if sharding.axis is None:
            assert torch.equal(first, parameter)
            assert torch.equal(second, parameter)
        else:
            num_cut += 1
            assert sharding.offset == first.size(sharding.axis)
            assert torch.equal(torch.cat([first, second], sharding.axis), parameter)
    assert num_cut == 4 * 7 + 1
    cut = sum(math.prod(piece.local_shape) for piece in pieces[0].table.values() if piece.axis is not None)
    assert pieces[0].num_sharded >= cut > 0
    assert whole.num_sharded == 0


def test_every_tensor_begins_on_a_cache_line(base: Base) -> None:
    adapter = Adapter(base, SPEC)
    adapter.initialise(7)
    assert all(parameter.data_ptr() % 64 == 0 for parameter in adapter.parameters.values())
    assert adapter.num_parameters == sum(parameter.numel() for parameter in adapter.parameters.values())


def test_the_model_is_the_base_again_when_a_pass_ends_in_an_error(base: Base) -> None:
    adapter = Adapter(base, SPEC)

    def end_in_an_error() -> None:
        with adapter.active():
            assert all(layer.is_adapted() for layer in base.adapted)
            raise MemoryError

    with pytest.raises(MemoryError):
        end_in_an_error()
    assert not any(layer.is_adapted() for layer in base.adapted)
