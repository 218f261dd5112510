"""The bytes between gateway and cell. A change of these golden bytes is a change of `PROTOCOL_VERSION`."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from trainer_cell.protocol import commands as c
from trainer_cell.protocol import outcomes as o
from trainer_cell.protocol.errors import CommandFailed, ErrorKind, category

GOLDEN = Path(__file__).with_name("golden.json")

ADAPTER = c.AdapterSpec(rank=8, alpha=32.0, train_attn=True, train_mlp=False, train_unembed=True)
ADAM = c.AdamParams(learning_rate=1e-4, beta1=0.9, beta2=0.95, eps=1e-12, weight_decay=0.0, grad_clip_norm=1.0)
SCHEDULE = c.LrSchedule(1e-3, 0.0, 1, 9, "WSD", 0.0, 4, "minus_sqrt", 0.0, 0.1, 5, "linear")
DATUM = c.Datum(
    tokens=b"\x01\0\0\0\x02\0\0\0",
    inputs={"target_tokens": c.Array("int64", (2,), bytes(16)), "weights": c.Array("float32", (2,), bytes(8))},
)
BASE = o.BaseModel("cellgate/tiny", ("tiny",), "ab" * 16, None, 512, 2048)
LAYOUT = o.Layout(world=2, tensor=1, pipeline=1, data=2)

COMMANDS: list[c.Command] = [
    c.CreateModel("1", "s:train:0", ADAPTER, 7, SCHEDULE),
    c.FreeModel("1", "s:train:0", turn=7, deadline_s=60.0),
    c.ForwardBackward("1", "s:train:0", (DATUM,), "cross_entropy", {"x": 1.5, "y": "z"}, False),
    c.OptimStep("1", "s:train:0", ADAM, ("learning_rate", "weight_decay")),
    c.DiscardGradients("1", "s:train:0"),
    c.SaveState("1", "s:train:0", "n", "weights", False, True, "t", "2026-01-01T00:00:00Z", None, {"k": "v"}),
    c.LoadState("1", "s:train:0", "s~train~0/.versions/weights.n.0", ADAPTER, True),
    c.ForgetModels("1", ("s:train:0",)),
    c.Acknowledge(("1", "2")),
    c.Tick(),
    c.Stop(),
]

SAID: list[o.Said] = [
    o.Hello(
        *(1, "e", LAYOUT, BASE, "fp32", True, False, False, 64, 128, (o.ResidentModel("m", ADAPTER, 1, 2, 3),)),
        outcomes=(o.OptimStepDone("1", 3, 4, {}), o.Failed("2", ErrorKind.NO_GRADIENTS, "none")),
        publishing=("3",),
    ),
    o.Progress("1", "writing", 5, 10),
    o.ModelCreated("1", 40448),
    o.ModelFreed("1", True),
    o.ForwardBackwardDone("1", (b"\0\0\x80\x3f",), {"loss:sum": 1.0}),
    o.OptimStepDone("1", 3, 4, {"grad_norm": 0.5}),
    o.GradientsDiscarded("1"),
    o.StateSaved("1", "v", 3, 4, True, 1000),
    o.StateLoaded("1", 3, 4, False, False, "no_load_optim"),
    o.ModelsForgotten("1", 2),
    o.Failed("1", ErrorKind.STORAGE_FAILED, "rank 1: ENOSPC"),
]


def encoded() -> dict[str, str]:
    messages = {type(command).__name__: c.encode_command(command) for command in COMMANDS}
    messages |= {type(said).__name__: o.encode_said(said) for said in SAID}
    return {name: payload.hex() for name, payload in messages.items()}


def test_every_message_has_its_golden_bytes() -> None:
    assert encoded() == json.loads(GOLDEN.read_text())


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: type(command).__name__)
def test_a_command_reads_back_as_it_was(command: c.Command) -> None:
    assert c.decode_command(c.encode_command(command)) == command


@pytest.mark.parametrize("said", SAID, ids=lambda said: type(said).__name__)
def test_what_a_cell_says_reads_back_as_it_was(said: o.Said) -> None:
    assert o.decode_said(o.encode_said(said)) == said


@pytest.mark.parametrize("field", ["seed", "adapter", "surplus"])
def test_a_message_with_a_wrong_missing_or_surplus_field_is_refused_by_its_name(field: str) -> None:
    fields = msgspec.msgpack.decode(c.encode_command(COMMANDS[0]))
    fields[field] = "seven"
    with pytest.raises(msgspec.ValidationError, match=field):
        c.decode_command(msgspec.msgpack.encode(fields))


def test_every_kind_of_failure_has_someone_who_can_mend_it() -> None:
    assert {category(kind) for kind in ErrorKind} == {"user", "server"}
    failure = o.Failed("1", ErrorKind.BAD_COMMAND, "no").as_error()
    assert isinstance(failure, CommandFailed)
    assert (failure.kind, failure.category, failure.message) == (ErrorKind.BAD_COMMAND, "user", "no")
