"""Length-prefixed frames: a 4-byte big-endian length, then that many bytes.

The blocking half serves rank 0, the asyncio half the gateway.
"""

from __future__ import annotations

import asyncio
import socket
import struct

MAX_FRAME_BYTES = 1 << 30
_LENGTH = struct.Struct(">I")


class FrameError(Exception):
    """The peer sent something that is not a frame of ours; the connection is of no further use."""


def _checked(length: int) -> int:
    if length > MAX_FRAME_BYTES:
        raise FrameError(f"frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
    return length


def send_frame(connection: socket.socket, payload: bytes) -> None:
    """Write one frame; raises `OSError` when the peer is gone."""
    connection.sendall(_LENGTH.pack(_checked(len(payload))))
    connection.sendall(payload)


def receive_frame(connection: socket.socket) -> bytes | None:
    """Read one whole frame; None at end of stream, also in the middle of a frame."""
    prefix = _receive_exactly(connection, _LENGTH.size)
    if prefix is None:
        return None
    return _receive_exactly(connection, _checked(_LENGTH.unpack(prefix)[0]))


def _receive_exactly(connection: socket.socket, length: int) -> bytes | None:
    buffer = bytearray(length)
    view = memoryview(buffer)
    received = 0
    while received < length:
        count = connection.recv_into(view[received:])
        if count == 0:
            return None
        received += count
    return bytes(buffer)


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """Read one whole frame; None at end of stream, also in the middle of a frame."""
    try:
        prefix = await reader.readexactly(_LENGTH.size)
        return await reader.readexactly(_checked(_LENGTH.unpack(prefix)[0]))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


async def write_frame(writer: asyncio.StreamWriter, payload: bytes) -> None:
    """Write one frame and wait until the transport can take more."""
    put_frame(writer, payload)
    await writer.drain()


def put_frame(writer: asyncio.StreamWriter, payload: bytes) -> None:
    """Write one frame, at once: no other comes in between."""
    writer.write(_LENGTH.pack(_checked(len(payload))))
    writer.write(payload)
