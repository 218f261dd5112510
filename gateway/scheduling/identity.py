"""Names, times and digests: ids of sessions, models, futures and commands, fingerprints of requests, of tenants."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from datetime import datetime

import msgspec
import xxhash

from gateway.scheduling.requests import Request

_TENANT_DIGEST_BYTES = 16
# Sorted keys: a retry whose maps came in another order is the same request.
_canonical = msgspec.msgpack.Encoder(order="deterministic")


def new_session_id() -> str:
    """Hex: goes unescaped into URLs, model ids and directory names. Not to be guessed."""
    return secrets.token_hex(12)


def new_request_id() -> str:
    return f"future-{secrets.token_hex(16)}"


def new_command_id() -> str:
    """Of a command that nobody asked for: parking, making resident, discarding."""
    return f"command-{secrets.token_hex(16)}"


def command_id_of(request_id: str) -> str:
    """Of what a future asks for: the same at every attempt, so that its outcome is known wherever it turns up."""
    return "command-" + request_id.removeprefix("future-")


def request_id_of(command_id: str) -> str:
    return "future-" + command_id.removeprefix("command-")


def model_id_of(session_id: str, model_seq_id: int) -> str:
    """The SDK computes the very same string for itself."""
    return f"{session_id}:train:{model_seq_id}"


def timestamp(moment: datetime) -> str:
    """UTC, ISO 8601 with `Z`, to the millisecond: as manifests have it."""
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def fingerprint(request: Request) -> bytes:
    """16 bytes over the decoded fields.

    Raises `OverflowError` or `UnicodeEncodeError` for values that no message can carry.
    """
    return digest_of(_canonical.encode(request))


def digest_of(data: bytes) -> bytes:
    return xxhash.xxh3_128_digest(data)


def tenant_digester(secret: bytes) -> Callable[[str], str]:
    """A keyed digest of tenant names, hex: manifests tell owners apart without naming them."""
    key = hashlib.blake2b(secret).digest()

    def digest(tenant: str) -> str:
        return hashlib.blake2b(tenant.encode(), digest_size=_TENANT_DIGEST_BYTES, key=key).hexdigest()

    return digest
