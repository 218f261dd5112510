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
from trainer_cell.protocol.commands import Acknowledge, DiscardGradients, encode_command
from trainer_cell.protocol.framing import receive_frame, send_frame
from trainer_cell.protocol.outcomes import (
    BaseModel,
    ForwardBackwardDone,
    GradientsDiscarded,
    Hello,
    Layout,
    Outcome,
    decode_said,
)

WORK, OTHER_WORK = (encode_command(DiscardGradients(command_id, "model")) for command_id in ("1", "2"))
BASE = BaseModel("cellgate/tiny", ("tiny",), "ab" * 16, None, 512, 2048)


class Gateway:
    """Accepts one connection at a time on `path`."""

    def __init__(self, path: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.settimeout(10)

    def accept_unheard(self) -> socket.socket:
        connection, _ = self._listener.accept()
        connection.settimeout(10)
        return connection

    def accept(self) -> tuple[socket.socket, Hello]:
        connection = self.accept_unheard()
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
    send_frame(connection, WORK)
    send_frame(connection, OTHER_WORK)
    receiving.join(10)
    assert (hello.epoch, received) == ("dial0", [WORK, OTHER_WORK])
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
    send_frame(second, WORK)
    receiving.join(10)
    assert received == [WORK]
    second.close()
    link.close()


def test_what_a_gateway_sent_before_it_went_is_taken_before_another_is_dialled(gateway: Gateway, path: Path) -> None:
    link = make_link(path)
    received: list[bytes | None] = []
    receiving = threading.Thread(target=lambda: received.extend(link.next_frame() for _ in range(2)))
    receiving.start()
    connection, _ = gateway.accept()
    send_frame(connection, WORK)
    send_frame(connection, OTHER_WORK)
    connection.close()
    receiving.join(10)
    assert received == [WORK, OTHER_WORK]
    link.close()


def test_what_is_said_to_a_gateway_that_is_gone_does_not_end_the_cell(gateway: Gateway, path: Path) -> None:
    link = make_link(path)
    receiving = threading.Thread(target=link.next_frame)
    receiving.start()
    connection, _ = gateway.accept()
    send_frame(connection, WORK)
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


def test_every_outcome_is_heard_by_one_gateway_or_the_next_whenever_it_is_said(gateway: Gateway, path: Path) -> None:
    """A thread says outcomes while gateways come, acknowledge what they hear, and go."""
    num_outcomes = 2000
    link = make_link(path)
    before = signal.getsignal(signal.SIGUSR1)
    link.stop_on_signal(signal.SIGUSR1)

    def take_frames() -> None:
        while not link.is_stopping:
            link.next_frame()

    taking = threading.Thread(target=take_frames)
    saying = threading.Thread(target=lambda: [link.say(GradientsDiscarded(str(n))) for n in range(num_outcomes)])
    heard: set[str] = set()
    taking.start()
    saying.start()
    while len(heard) < num_outcomes:
        connection, hello = gateway.accept()
        hear_for_a_while(connection, hello, heard, num_outcomes)
    os.kill(os.getpid(), signal.SIGUSR1)
    for thread in (saying, taking):
        thread.join(10)
    signal.signal(signal.SIGUSR1, before)
    link.close()
    assert heard == {str(number) for number in range(num_outcomes)}


def test_an_outcome_that_is_said_while_a_hello_is_on_its_way_follows_it_on_the_same_connection(
    gateway: Gateway, path: Path
) -> None:
    link = make_link(path)
    # More than a socket takes, so that the hello is under way until somebody reads it.
    large = ForwardBackwardDone("large", (bytes(16 << 20),), {})
    link.say(large)
    taking = threading.Thread(target=link.next_frame)
    taking.start()
    connection = gateway.accept_unheard()
    connection.recv(1, socket.MSG_PEEK)  # the hello has begun
    saying = threading.Thread(target=lambda: link.say(GradientsDiscarded("late")))
    saying.start()
    saying.join(0.3)  # as far as it gets: it must not have been told to nobody by then
    hello = decode_said(receive_frame(connection) or b"")
    assert isinstance(hello, Hello)
    assert hello.outcomes == (large,)
    assert decode_said(receive_frame(connection) or b"") == GradientsDiscarded("late")
    send_frame(connection, WORK)
    for thread in (saying, taking):
        thread.join(10)
    connection.close()
    link.close()


def hear_for_a_while(connection: socket.socket, hello: Hello, heard: set[str], most: int) -> None:
    """Acknowledge what the hello tells and what is said then, for 20 outcomes, and hang up."""
    heard.update(outcome.command_id for outcome in hello.outcomes)
    send_frame(connection, encode_command(Acknowledge(tuple(outcome.command_id for outcome in hello.outcomes))))
    for _ in range(20):
        if len(heard) == most:
            break
        said = decode_said(receive_frame(connection) or b"")
        assert isinstance(said, Outcome)
        heard.add(said.command_id)
        send_frame(connection, encode_command(Acknowledge((said.command_id,))))
    connection.close()
