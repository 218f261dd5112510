"""The TCP socket clients connect to."""

from __future__ import annotations

import socket

# What listens on every address is reached on the loopback one.
_LOOPBACK = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}


def open_listener(host: str, port: int) -> socket.socket:
    """A listening TCP socket; raises `OSError` naming the address."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        return socket.create_server((host, port), family=family, backlog=512)
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error


def port_of(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def url_of(host: str, listener: socket.socket) -> str:
    """As clients are told."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port_of(listener)}"


def probe_url_of(host: str, listener: socket.socket) -> str:
    """As a process on this host reaches it."""
    return url_of(_LOOPBACK.get(host, host), listener)
