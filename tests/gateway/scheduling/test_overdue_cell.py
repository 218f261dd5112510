"""A cell that neither answers nor ends by itself, as one whose rank 0 is stopped, is ended by the gateway."""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
from pathlib import Path

import pytest

from gateway.scheduling import cell_link
from gateway.scheduling.cell_link import CellLink, CellLost
from tests.gateway.scheduling.rig import within
from trainer_cell.protocol.commands import FreeModel

# Says hello as a cell does, and then nothing.
MUTE_CELL = """
import socket, sys, time
from tests.fakes.fake_cell import FakeCell
from pathlib import Path
from trainer_cell.protocol.framing import send_frame
from trainer_cell.protocol.outcomes import encode_said
cell = FakeCell(Path(sys.argv[1]), Path(sys.argv[2]))
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[1])
send_frame(connection, encode_said(cell._hello))
time.sleep(600)
"""


async def test_a_cell_that_is_overdue_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cell_link, "_SLACK_S", 0.1)
    with tempfile.TemporaryDirectory(prefix="cell") as directory:
        link = CellLink(Path(directory) / "cell.sock")
        await link.start()
        cell = await asyncio.create_subprocess_exec(
            sys.executable, "-c", MUTE_CELL, str(link.socket_path), str(tmp_path)
        )
        try:
            await within(link.ready.wait())
            with pytest.raises(CellLost):
                await within(link.execute(FreeModel("command-1", "m", deadline_s=0.1)))
            assert await within(cell.wait()) == -signal.SIGKILL
            assert not link.ready.is_set()
        finally:
            if cell.returncode is None:
                cell.kill()
            await link.close()
