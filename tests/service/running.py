"""A `cellgate serve` of its own for a test: start, find the processes, kill them, start again on the same state."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx
import psutil
import tinker

API_KEY = "tml-test-key"
OTHER_KEY = "tml-other-key"
READY_TIMEOUT_S = 150.0


class RunningService:
    """One service over `state`; its checkpoints lie in `state/checkpoints`."""

    def __init__(
        self,
        state: Path,
        *options: str,
        base_model: str = "tiny",
        ranks: int = 1,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.state = state
        self.checkpoints = state / "checkpoints"
        self._options = (
            *("--base-model", base_model, "--ranks", str(ranks), "--state", str(state)),
            *("--api-key", f"{API_KEY}=alice", "--api-key", f"{OTHER_KEY}=bob"),
            *options,
        )
        self._environment = {**os.environ, **(environment or {})}
        self._clients: list[tinker.ServiceClient] = []
        self.log: deque[str] = deque(maxlen=2000)
        self.url = ""
        self._port = "0"
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> RunningService:
        """Start and wait for the ready line; at the same address as before, for clients that are still there."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gateway.cli", "serve", "--port", self._port, *self._options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self._environment,
        )
        threading.Thread(target=self._drain, args=(self._process.stderr,), daemon=True).start()
        watchdog = threading.Timer(READY_TIMEOUT_S, self._process.kill)
        watchdog.start()
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.log.append(line)
            if line.startswith("cellgate ready "):
                self.url = line.split()[-1]
                self._port = self.url.rpartition(":")[2]
                break
        watchdog.cancel()
        assert self.url, "the service did not come up:\n" + "".join(self.log)
        threading.Thread(target=self._drain, args=(self._process.stdout,), daemon=True).start()
        return self

    def _drain(self, stream: object) -> None:
        for line in stream:  # type: ignore[attr-defined]
            self.log.append(line)

    # --- processes

    def pids(self) -> dict[str, int]:
        """`supervisor`, `gateway` and `cell` (the torchrun agent)."""
        return json.loads((self.state / "run" / "pids.json").read_text())  # type: ignore[no-any-return]

    def gateway(self) -> psutil.Process:
        return psutil.Process(self.pids()["gateway"])

    def ranks(self) -> list[psutil.Process]:
        """The ranks of the cell, by rank."""
        found = [
            child
            for child in psutil.Process(self.pids()["cell"]).children(recursive=True)
            if "RANK" in child.environ() and "trainer_cell" in " ".join(child.cmdline())
        ]
        return sorted(found, key=lambda process: int(process.environ()["RANK"]))

    def everything(self) -> list[psutil.Process]:
        assert self._process is not None
        top = psutil.Process(self._process.pid)
        return [top, *top.children(recursive=True)]

    def kill_everything(self) -> None:
        """The service's processes, and whatever its clients are."""
        self.end_clients()
        self.kill()

    def kill(self) -> None:
        """SIGKILL to every process at once, and wait until all are gone; fine when they are already."""
        if self._process is None or self._process.poll() is not None:
            return
        processes = self.everything()
        for process in processes:
            _kill(process)
        _, alive = psutil.wait_procs(processes, timeout=10)
        assert not alive
        self._process.wait()

    def stop(self) -> int:
        """SIGTERM and the exit status."""
        assert self._process is not None
        self.end_clients()
        if self._process.poll() is None:
            processes = self.everything()
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                self.kill_everything()
                raise
            psutil.wait_procs(processes, timeout=10)
        return self._process.returncode

    def wait_until_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Until the gateway answers and a cell of after the kill is attached."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                answer = httpx.get(f"{self.url}/readyz", timeout=5)
            except httpx.HTTPError:
                answer = None
            if answer is not None and answer.status_code == 200:
                return
            time.sleep(0.1)
        raise AssertionError("not ready again:\n" + "".join(self.log))

    # --- clients

    def client(self, key: str = API_KEY) -> tinker.ServiceClient:
        client = tinker.ServiceClient(base_url=self.url, api_key=key)
        self._clients.append(client)
        return client

    def end_clients(self) -> None:
        """As if their programs had died: no more heartbeats, and nothing said to the service."""
        for client in self._clients:
            if not client._closed:
                client.holder.run_coroutine_threadsafe(client._close_holders()).result(timeout=30)
        self._clients.clear()


def _kill(process: psutil.Process) -> None:
    try:
        os.kill(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def datum(tokens: Sequence[int], weights: Sequence[float] | None = None) -> tinker.Datum:
    """Predict each next token of `tokens`."""
    targets = list(tokens[1:])
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(list(tokens[:-1])),
        loss_fn_inputs={"target_tokens": targets, "weights": list(weights or [1.0] * len(targets))},
    )
