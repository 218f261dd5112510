"""A real uvicorn on a loopback port, in a thread of the test's own process."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.types import ASGIApp


class Listening:
    """url: where; run: a coroutine in the server's loop, from the test's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, server: uvicorn.Server, port: int) -> None:
        self.loop = loop
        self.server = server
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)

    def stop(self) -> None:
        """What SIGTERM does."""
        self.server.should_exit = True


@contextmanager
def listening(
    app: ASGIApp, server_of: Callable[[uvicorn.Config], uvicorn.Server] = uvicorn.Server, port: int = 0
) -> Iterator[Listening]:
    """Serves `app` until the block ends; a server of another kind may be given."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", port))
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5, lifespan="auto")
    server = server_of(config)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=lambda: loop.run_until_complete(server.serve(sockets=[sock])), daemon=True)
    up = _watch_startup(server)
    thread.start()
    assert up.wait(30), "the server did not start"
    try:
        yield Listening(loop, server, sock.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive(), "the server did not stop"
        loop.close()


def _watch_startup(server: uvicorn.Server) -> threading.Event:
    up = threading.Event()
    startup = server.startup

    async def told_startup(sockets: list[socket.socket] | None = None) -> None:
        await startup(sockets)
        up.set()

    server.startup = told_startup  # type: ignore[method-assign]
    return up
