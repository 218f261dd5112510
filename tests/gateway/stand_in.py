"""Stand-ins for the processes a supervisor runs: they serve /readyz, tell what happens to them, and do nothing else.

    python -m tests.gateway.stand_in ROLE DIRECTORY [ARGUMENT…]

Each tells its story, a line an event, through the fifo DIRECTORY/events.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import FrameType

from gateway import die_with_parent
from gateway.exit_status import NOT_AGAIN
from gateway.state_directory import StateDirectory
from gateway.supervisor import Plan, Supervisor


def tell(directory: Path, event: str) -> None:
    with (directory / "events").open("w") as fifo:
        fifo.write(event + "\n")


def leave_on_sigterm(directory: Path, name: str) -> None:
    def leave(number: int, frame: FrameType | None) -> None:
        tell(directory, f"{name} stops")
        sys.exit(0)

    signal.signal(signal.SIGTERM, leave)


def gateway(directory: Path, descriptor: str, *options: str) -> None:
    """Ready while a cell says so."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if (directory / "cell_is_ready").exists() else 503)
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = HTTPServer(("", 0), Answers, bind_and_activate=False)
    server.socket = socket.socket(fileno=int(descriptor))
    leave_on_sigterm(directory, "gateway")
    tell(directory, f"gateway {os.getpid()} {' '.join(options)}")
    server.serve_forever()


def cell(directory: Path, kind: str) -> None:
    """With one rank, a process in a session of its own, as torchrun makes it; none where its device is gone."""
    if (directory / "device_is_gone").exists():
        broken(directory, "cell")
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    if kind != "strays":
        command = [sys.executable, die_with_parent.__file__, str(os.getpid()), *command]
    rank = subprocess.Popen(command, start_new_session=True)
    if kind == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        leave_on_sigterm(directory, "cell")
    (directory / "cell_is_ready").touch()
    tell(directory, f"cell {os.getpid()} {rank.pid}")
    time.sleep(600)


def broken(directory: Path, name: str, *options: str) -> None:
    tell(directory, f"{name} breaks")
    sys.stderr.write("there is no such device\n")
    sys.exit(3)


def unwilling(directory: Path, descriptor: str, *options: str) -> None:
    """A gateway that answers for a while, and then knows that it never will serve."""
    sys.stderr.write("a line of no importance\ncellgate: the checkpoint is over other weights\n")
    sys.exit(NOT_AGAIN)


def supervisor(directory: Path, kinds: str, stop_grace_s: str) -> None:
    """kinds: comma-separated, what is different from the plain case."""
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"

    def role(name: str, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "tests.gateway.stand_in", name, str(directory), *arguments]

    def cell_command(base_model: str) -> list[str]:
        assert base_model == "/prepared"
        if "broken_cell" in kinds:
            return role("broken", "cell")
        return role("cell", "strays" if "strays" in kinds else "stubborn" if "stubborn" in kinds else "plain")

    gateways = {"broken_gateway": role("broken", "gateway"), "unwilling": role("unwilling", str(listener.fileno()))}
    plan = Plan(
        gateway=gateways.get(kinds) or role("gateway", str(listener.fileno())),
        prepare=role("broken", "base") if "broken_base" in kinds else ["sh", "-c", "echo working; echo /prepared"],
        cell=cell_command,
        listener=listener.fileno(),
        url=url,
        probe_url=url,
        gateway_environment=os.environ,
        cell_environment=os.environ,
        stop_grace_s=float(stop_grace_s),
        start_up=("--first",),
        first_pause_s=0.01,
    )
    state = StateDirectory(directory)
    state.create()

    async def run() -> int:
        return await Supervisor(plan, state).run()

    sys.exit(asyncio.run(run()))


if __name__ == "__main__":
    roles: dict[str, Callable[..., None]] = {
        "gateway": gateway,
        "cell": cell,
        "broken": broken,
        "unwilling": unwilling,
        "supervisor": supervisor,
    }
    roles[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
