"""The simulated cell does what rank 0 does: `trainer_cell.gateway_link` is what it stands for."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.gateway.scheduling.stateful.cell import SimulatedCell
from tests.gateway.scheduling.stateful.clock import Clock
from tests.gateway.scheduling.stateful.wire import Connection
from trainer_cell.protocol.commands import AdapterSpec, CreateModel, FreeModel, ModelCommand, encode_command
from trainer_cell.protocol.framing import put_frame, read_frame
from trainer_cell.protocol.outcomes import Hello, decode_said
from trainer_cell.vault.layout import Vault

COMMAND_S = 0.2
ADAPTER = AdapterSpec(4, 32.0, True, True, True)


class Listening:
    """Takes every cell that dials. connections: one for each time it did."""

    def __init__(self, clock: Clock, loop: asyncio.AbstractEventLoop) -> None:
        self.connections: list[Connection] = []
        self._clock, self._loop = clock, loop

    def dial(self, cell: SimulatedCell) -> Connection:
        self.connections.append(Connection(self._clock, lambda: 0.0, cell, self._loop))
        return self.connections[-1]

    def has_asked(self, command_id: str) -> bool:
        return True

    async def hello(self) -> Hello:
        """Of the last dial."""
        frame = await read_frame(self.connections[-1].reader)
        assert frame is not None
        said = decode_said(frame)
        assert isinstance(said, Hello)
        return said

    def send(self, *commands: ModelCommand) -> None:
        for command in commands:
            put_frame(self.connections[-1], encode_command(command))  # type: ignore[arg-type]


def pass_time(clock: Clock, seconds: float) -> None:
    end = clock.now + seconds
    while clock.now < end:
        clock.advance(end)


async def test_a_cell_whose_gateway_goes_dials_again_when_it_has_done_all_that_the_gateway_sent(tmp_path: Path) -> None:
    vault = Vault(tmp_path / "checkpoints")
    vault.create()
    clock = Clock()
    gateways = Listening(clock, asyncio.get_running_loop())
    cell = SimulatedCell(vault.root, clock, gateways, 2, lambda: COMMAND_S, lambda: 0.0)
    pass_time(clock, 0.05)
    gateways.send(CreateModel("created", "m", ADAPTER, 1), CreateModel("other", "n", ADAPTER, 1))
    gateways.send(FreeModel("freed", "m"))
    pass_time(clock, COMMAND_S / 2)
    gateways.connections[-1].end_of_gateway()
    pass_time(clock, 2 * COMMAND_S)
    assert len(gateways.connections) == 1, "it dialled with a command in hand"
    pass_time(clock, COMMAND_S)
    hello = await gateways.hello()
    assert [one.model_id for one in hello.models] == ["n"]
    assert [outcome.command_id for outcome in hello.outcomes] == ["created", "other", "freed"]
    cell.kill()
