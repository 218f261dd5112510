"""Rank 0's end of the socket, against a listening gateway's."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer_cell.gateway_link import GatewayLink
from trainer_cell.protocol.framing import receive_frame, send_frame
from trainer_cell.protocol.outcomes import BaseModel, GradientsDiscarded, Hello, Layout, decode_said

BASE = BaseModel("cellgate/tiny", ("tiny",), "ab" * 16, None, 512, 2048)


class Gateway:
    """Accepts one connection at a time on `path`."""

    def __init__(self, path: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.settimeout(10)

    def accept(self) -> tuple[socket.socket, Hello]:
        connection, _ = self._listener.accept()
        hello = decode_said(receive_frame(connection) or b"")
        assert isinstance(hello, Hello)
        return connection, hello

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "socket"


@pytest.fixture
def gateway(path: Path) -> Iterator[Gateway]:
    listening = Gateway(path)
    yield listening
    listening.close()


def make_link(path: Path) -> GatewayLink:
    dials = iter(range(100))
    return GatewayLink(
        path,
        lambda: Hello(1, f"dial{next(dials)}", Layout(1, 1, 1, 1), BASE, "fp32", True, False, False, 1, 8, ()),
    )


def test_the_link_says_hello_and_gives_frames_in_order(gateway: Gateway, path: Path) -> None:
    link = make_link(path)
    received: list[bytes | None] = []
    receiving = threading.Thread(target=lambda: received.extend(link.next_frame() for _ in range(2)))
    receiving.start()
    connection, hello = gateway.accept()
    send_frame(connection, b"one")
    send_frame(connection, b"two")
    receiving.join(10)
    assert (hello.epoch, received) == ("dial0", [b"one", b"two"])
    link.say(GradientsDiscarded("1"))
    assert decode_said(receive_frame(connection) or b"") == GradientsDiscarded("1")
    connection.close()
    link.close()


def test_a_gateway_that_goes_away_is_dialled_again_and_told_a_new_hello(gateway: Gateway, path: Path) -> None:
    link = make_link(path)
    received: list[bytes | None] = []
    receiving = threading.Thread(target=lambda: received.append(link.next_frame()))
    receiving.start()
    first, _ = gateway.accept()
    first.sendall(b"\0\0\0\x09half")  # dies in the middle of a frame
    first.close()
    second, hello = gateway.accept()
    assert hello.epoch == "dial1"
    send_frame(second, b"whole")
    receiving.join(10)
    assert received == [b"whole"]
    second.close()
    link.close()


def test_what_is_said_to_a_gateway_that_is_gone_does_not_end_the_cell(gateway: Gateway, path: Path) -> None:
    link = make_link(path)
    receiving = threading.Thread(target=link.next_frame)
    receiving.start()
    connection, _ = gateway.accept()
    send_frame(connection, b"work")
    receiving.join(10)
    connection.close()
    gateway.close()
    for _ in range(3):
        link.say(GradientsDiscarded("1"))
    link.close()


def test_a_stop_signal_wakes_a_waiting_link_for_good(gateway: Gateway, path: Path) -> None:
    link = make_link(path)
    before = signal.getsignal(signal.SIGUSR1)
    link.stop_on_signal(signal.SIGUSR1)
    stopping = threading.Thread(target=lambda: (gateway.accept(), os.kill(os.getpid(), signal.SIGUSR1)))
    stopping.start()
    assert link.next_frame() is None
    assert link.is_stopping
    assert link.next_frame() is None
    stopping.join(10)
    signal.signal(signal.SIGUSR1, before)
    link.close()
