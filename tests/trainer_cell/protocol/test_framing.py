"""Frames over a real socket: whole, or not at all."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading

import pytest

from trainer_cell.protocol.framing import (
    MAX_FRAME_BYTES,
    FrameError,
    read_frame,
    receive_frame,
    send_frame,
    write_frame,
)


@pytest.mark.parametrize("payload", [b"", b"x", bytes(range(256)) * 10_000])
def test_a_frame_arrives_as_it_was_sent_by_the_other_half(payload: bytes) -> None:
    async def through_asyncio() -> bytes | None:
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours)
        answering = threading.Thread(target=lambda: send_frame(theirs, receive_frame(theirs) or b""))
        answering.start()
        await write_frame(writer, payload)
        received = await read_frame(reader)
        answering.join()
        writer.close()
        theirs.close()
        return received

    assert asyncio.run(through_asyncio()) == payload


@pytest.mark.parametrize("sent", [b"", b"\0\0", b"\0\0\0\x05abc"])
def test_a_stream_that_ends_inside_a_frame_is_at_its_end(sent: bytes) -> None:
    ours, theirs = socket.socketpair()
    theirs.sendall(sent)
    theirs.close()
    assert receive_frame(ours) is None
    ours.close()


def test_a_length_over_the_limit_is_refused_before_anything_is_read() -> None:
    ours, theirs = socket.socketpair()
    theirs.sendall(struct.pack(">I", MAX_FRAME_BYTES + 1))
    with pytest.raises(FrameError):
        receive_frame(ours)
    for end in (ours, theirs):
        end.close()
