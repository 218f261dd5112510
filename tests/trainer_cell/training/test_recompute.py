"""Recomputing activations gives the same bits as keeping them, whichever adapter is active when that happens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.trainer_cell.training.arithmetic import ADAM, batches
from tests.trainer_cell.training.conftest import ALONE
from tests.trainer_cell.training.snapshots import snapshot
from tests.trainer_cell.training.wire import forward_backward_command, optim_command
from trainer_cell.protocol.commands import AdapterSpec
from trainer_cell.ranks import Ranks
from trainer_cell.training import recompute
from trainer_cell.training.attention import packed
from trainer_cell.training.build import Base, build_base
from trainer_cell.training.gradients import gathering
from trainer_cell.training.slots import Slot, SlotTable
from trainer_cell.training.step import forward_backward, optim_step

SPEC = AdapterSpec(4, 8.0, train_attn=True, train_mlp=True, train_unembed=True)
DATA = batches(512, 1, (9, 3, 30, 1))[0]


@pytest.fixture(scope="module")
def recomputing(tiny: Path, ranks: Ranks) -> Base:
    return build_base(tiny, ALONE, torch.device("cpu"), torch.float32, recompute=True)


def trained(base: Base, ranks: Ranks, steps: int = 2, seed: int = 1) -> Slot:
    slot = SlotTable(base, 1, 8).create("one", SPEC, seed)
    for _ in range(steps):
        forward_backward(base, slot, ranks, forward_backward_command(DATA))
        optim_step(slot, ranks, optim_command(ADAM))
    return slot


def accumulated(base: Base, ranks: Ranks, slot: Slot) -> dict[str, torch.Tensor]:
    forward_backward(base, slot, ranks, forward_backward_command(DATA))
    gradient = slot.optimizer.gradient
    assert gradient is not None
    return {name: view.clone() for name, view in slot.adapter.views(gradient).items()}


def test_gradients_and_steps_are_bit_identical(base: Base, recomputing: Base, ranks: Ranks) -> None:
    kept, again = trained(base, ranks), trained(recomputing, ranks)
    assert snapshot(kept) == snapshot(again)
    accumulated(base, ranks, kept)
    assert all(bool(gradient.any()) for gradient in accumulated(recomputing, ranks, again).values())
    assert snapshot(kept) == snapshot(again)


def test_gradients_are_bit_identical_in_bf16(bf16_base: Base, tiny: Path, ranks: Ranks) -> None:
    again = build_base(tiny, ALONE, torch.device("cpu"), torch.bfloat16, recompute=True)
    assert snapshot(trained(bf16_base, ranks)) == snapshot(trained(again, ranks))


def test_checkpoints_that_look_at_their_input_would_lose_gradients(
    recomputing: Base, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a frozen embedding: nothing fails, and all but the head's gradients are gone."""
    slot = trained(recomputing, ranks)

    def looking(function: Any, *args: Any, **kwargs: Any) -> Any:
        hidden = args[2]["hidden_states"]

        def on_hidden(hidden: torch.Tensor) -> Any:
            return function(args[0], args[1], {**args[2], "hidden_states": hidden})

        return checkpoint(on_hidden, hidden, use_reentrant=True)

    monkeypatch.setattr(recompute, "checkpoint", looking)
    gradients = accumulated(recomputing, ranks, slot)
    assert {name for name, gradient in gradients.items() if bool(gradient.any())} == {
        "base_model.model.lm_head.lora_A.weight",
        "base_model.model.lm_head.lora_B.weight",
    }


@pytest.mark.parametrize("forward_only", [True, False])
def test_layers_compute_again_for_gradients_only(
    base: Base, recomputing: Base, ranks: Ranks, forward_only: bool
) -> None:
    passes = {}
    for one in (base, recomputing):
        calls: list[None] = []
        hook = one.model.decoder.layers[1].mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(None))
        forward_backward(one, trained(one, ranks, 0), ranks, forward_backward_command(DATA, forward_only))
        hook.remove()
        passes[one is recomputing] = len(calls)
    assert passes == {False: 1, True: 1 if forward_only else 2}


def switched(base: Base, slot: Slot, other: Slot | None) -> dict[str, torch.Tensor]:
    """The slot's gradients when another adapter is active during the backward pass; None: no adapter at all."""
    assert base.head is not None
    lengths = tuple(len(datum.tokens) for datum in DATA)
    tokens = torch.cat([datum.tokens for datum in DATA])[None]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    with gathering(slot.adapter) as gradient:
        with slot.adapter.active():
            hidden = base.model(tokens, positions, None, packed_seq_params=packed(lengths))
            logprobs = base.head.target_logprobs(hidden[0], torch.cat([datum.targets for datum in DATA]))
        loss = -(logprobs * torch.cat([datum.weights for datum in DATA])).sum()
        if other is None:
            loss.backward()
        else:
            with other.adapter.active():
                loss.backward()
    return {name: view.clone() for name, view in slot.adapter.views(gradient).items()}


@pytest.mark.parametrize("other_is_active", [True, False])
def test_another_adapter_in_the_backward_pass_changes_nothing(
    recomputing: Base, ranks: Ranks, monkeypatch: pytest.MonkeyPatch, other_is_active: bool
) -> None:
    monkeypatch.setattr(recomputing.head, "_tokens_kept", 0)  # so that the head computes again as well
    slot = trained(recomputing, ranks)
    other = trained(recomputing, ranks, seed=2) if other_is_active else None
    expected = accumulated(recomputing, ranks, slot)
    gradients = switched(recomputing, slot, other)
    assert all(torch.equal(gradients[name], gradient) for name, gradient in expected.items())


def test_an_adapter_that_is_module_state_would_be_mistaken_for_another(
    recomputing: Base, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot, other = trained(recomputing, ranks), trained(recomputing, ranks, seed=2)
    expected = accumulated(recomputing, ranks, slot)
    forward = recompute.TransformerLayer.forward
    monkeypatch.setattr(
        recompute.RecomputedLayer, "_routed", lambda self, _routings, args, kwargs: forward(self, *args, **kwargs)
    )
    gradients = switched(recomputing, slot, other)
    inside = [name for name in expected if "lm_head" not in name]
    assert not any(torch.equal(gradients[name], expected[name]) for name in inside)
