"""A whole `cellgate serve`, to be killed in parts; and a cell that is started alone, with the bench as its gateway."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

from bench.ratios import timed
from gateway import die_with_parent
from trainer_cell.protocol.framing import receive_frame
from trainer_cell.protocol.outcomes import Hello, decode_said

KEY = "tml-bench"
_PATIENCE_S = 300.0
_LOOK_S = 0.005


class Served:
    """One service with its state in `state`."""

    def __init__(self, state: Path, url: str) -> None:
        self.url = url
        self._pids = state / "run" / "pids.json"

    def gateway(self) -> psutil.Process:
        return psutil.Process(self._told()["gateway"])

    def rank_0(self) -> psutil.Process:
        children = psutil.Process(self._told()["cell"]).children(recursive=True)
        return next(child for child in children if child.environ().get("RANK") == "0")

    def wait_replaced(self, *gone: psutil.Process) -> None:
        """Until the service is ready with other processes than these."""
        psutil.wait_procs(gone, timeout=_PATIENCE_S)
        deadline = time.monotonic() + _PATIENCE_S
        while not self._is_ready_without(gone):
            assert time.monotonic() < deadline, "the service does not come back"
            time.sleep(_LOOK_S)

    def _is_ready_without(self, gone: tuple[psutil.Process, ...]) -> bool:
        try:
            present = [self.gateway(), self.rank_0()]
            return not set(present) & set(gone) and httpx.get(f"{self.url}/readyz", timeout=5).is_success
        except (OSError, KeyError, StopIteration, psutil.Error, httpx.HTTPError):
            return False  # one of them is about to start, or to end

    def _told(self) -> dict[str, int]:
        return json.loads(self._pids.read_text())  # type: ignore[no-any-return]


@contextmanager
def served(directory: Path, *options: str) -> Iterator[Served]:
    """Ready when it is entered; its log is in `directory`."""
    state = directory / "state"
    # Not even a bench that is killed leaves it running.
    command = [sys.executable, "-I", "-S", str(Path(die_with_parent.__file__)), str(os.getpid())]
    command += [sys.executable, "-m", "gateway.cli", "serve", "--state", str(state), "--port", "0"]
    command += ["--api-key", f"{KEY}=bench", *options]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        url = next((line.split()[-1] for line in process.stdout if line.startswith("cellgate ready ")), None)
        assert url is not None, (directory / "log").read_text()
        yield Served(state, url)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


class BareCell:
    """Starts a cell again and again over a checkpoint root of its own."""

    def __init__(self, directory: Path, base_model: str, ranks: int) -> None:
        self._log = directory / "cell.log"
        self._address = directory / "bare.sock"
        checkpoints = directory / "bare-checkpoints"
        checkpoints.mkdir()
        self._command = [sys.executable, "-m", "trainer_cell.agent", "--nnodes", "1", "--nproc-per-node", str(ranks)]
        self._command += ["--local-addr", "127.0.0.1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
        self._command += ["-m", "trainer_cell", "--base-model", base_model, "--checkpoints", str(checkpoints)]
        self._command += ["--gateway-socket", str(self._address)]

    def start(self) -> float:
        """Seconds from nothing to the cell's hello; it is gone again when this returns."""
        with socket.socket(socket.AF_UNIX) as listener, self._log.open("wb") as log:
            listener.bind(str(self._address))
            listener.listen(1)
            listener.settimeout(_PATIENCE_S)
            processes: list[psutil.Process] = []
            try:
                return timed(lambda: processes.append(self._until_hello(listener, log.fileno())))
            finally:
                self._address.unlink()
                _end(processes)

    def _until_hello(self, listener: socket.socket, log: int) -> psutil.Process:
        process = psutil.Popen(self._command, stdout=log, stderr=log)
        connection, _ = listener.accept()
        with connection:
            frame = receive_frame(connection)
        assert frame is not None
        assert isinstance(decode_said(frame), Hello)
        return process


def _end(processes: list[psutil.Process]) -> None:
    for process in processes:
        everything = [*process.children(recursive=True), process]
        for one in everything:
            os.kill(one.pid, signal.SIGKILL)
        psutil.wait_procs(everything)
