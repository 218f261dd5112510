"""A save of a new name that another cell published, and nobody heard of it: asked for again, it is the same save."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from tests.service.state import read_state
from tests.trainer_cell import odd_base
from tests.trainer_cell.client import Client, new_id
from tests.trainer_cell.running_cell import RunningCell
from tests.trainer_cell.training.arithmetic import batches
from trainer_cell.protocol.commands import AdapterSpec, SaveState
from trainer_cell.protocol.errors import ErrorKind
from trainer_cell.protocol.outcomes import Failed, StateSaved
from trainer_cell.vault.layout import Vault

pytestmark = pytest.mark.cell

MODEL = "session:train:0"
SPEC = AdapterSpec(4, 8.0, train_attn=True, train_mlp=True, train_unembed=True)
LAYOUTS = {"alone": (1, 1), "tp2": (2, 2)}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Client]]:
    """A cell over the root of the others, and the model as it is before its save."""
    base = odd_base.write(tmp_path / "base")
    cells: list[RunningCell] = []

    def start_one(layout: str) -> Client:
        ranks, tp = LAYOUTS[layout]
        cell = RunningCell(base, tmp_path / "checkpoints", ranks=ranks, tp=tp)
        cells.append(cell)
        model = Client(cell, MODEL, SPEC)
        model.create(seed=1)
        model.train(batches(odd_base.VOCAB, 1, (17, 5))[0])
        return model

    yield start_one
    for cell in cells:
        cell.close()


def of_a_new_name(model: Client) -> SaveState:
    return msgspec.structs.replace(model.save_command("n"), overwrite=False)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_next_cell_answers_with_what_was_published(
    start: Callable[[str], Client], tmp_path: Path, layout: str
) -> None:
    first, root = start(layout), tmp_path / "checkpoints"
    command = of_a_new_name(first)
    published = first.cell.do(command, StateSaved)
    state = read_state(root, f"tinker://{MODEL}/weights/n")
    first.cell.stop()
    again = start(layout)
    assert again.cell.do(command, StateSaved) == published
    assert len(list(Vault(root).versions_dir(MODEL).iterdir())) == 1
    assert read_state(root, f"tinker://{MODEL}/weights/n").same_as(state)
    # The next save works, and the control: a name that another command took is taken.
    assert again.cell.do(msgspec.structs.replace(command, command_id=new_id(), name="m"), StateSaved)
    refused = again.cell.execute(msgspec.structs.replace(command, command_id=new_id()))
    assert isinstance(refused, Failed)
    assert refused.kind is ErrorKind.CHECKPOINT_EXISTS
