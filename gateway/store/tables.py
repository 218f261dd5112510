"""The tables, as the newest migration leaves them.

Payloads and outcomes lie in tables of their own: an update of a row writes the whole row again, and a command's row is
updated several times in its life.
"""

from __future__ import annotations

from sqlalchemy import JSON, BigInteger, Boolean, Column, Double, Index, LargeBinary, MetaData, String, Table

metadata = MetaData()

sessions = Table(
    "sessions",
    metadata,
    Column("session_id", String, primary_key=True),
    Column("tenant", String, nullable=False),
    Column("tags", JSON, nullable=False),
    Column("user_metadata", JSON, nullable=False),
    Column("sdk_version", String),
    Column("project_id", String),
    Column("display_name", String),
    Column("beats", Boolean, nullable=False),
    Column("created", String, nullable=False),
    Column("finish_reason", String),
    Column("finish_detail", String),
    Column("last_sign", Double, nullable=False),
)

models = Table(
    "models",
    metadata,
    Column("model_id", String, primary_key=True),
    Column("session_id", String, nullable=False),
    Column("tenant", String, nullable=False),
    Column("number", BigInteger, nullable=False),
    Column("created", String, nullable=False),
    Column("last_request", String, nullable=False),
    Column("facts", LargeBinary, nullable=False),
    Column("snapshot", String),
    Column("snapshot_turn", BigInteger, nullable=False),
    Column("floor", BigInteger, nullable=False),
    Column("floor_turn", BigInteger, nullable=False),
    Column("is_over", Boolean, nullable=False),
)

commands = Table(
    "commands",
    metadata,
    Column("request_id", String, primary_key=True),
    Column("model_id", String, nullable=False),
    Column("tenant", String, nullable=False),
    Column("moment", BigInteger, nullable=False),
    Column("seq_id", BigInteger),
    Column("key", String),
    Column("key_digest", LargeBinary),
    Column("fingerprint", LargeBinary, nullable=False),
    Column("operation", String, nullable=False),
    Column("request", LargeBinary, nullable=False),
    Column("payload_bytes", BigInteger, nullable=False),
    Column("accepted", Double, nullable=False),
    Column("attempts", BigInteger, nullable=False),
    Column("turn", BigInteger),
    Column("version", String),
    Column("finished", Double),
    Column("told_moment", BigInteger),
    Column("told", Double),
    Index("commands_by_model", "model_id", "turn"),
)

# digest: of `data`, so that a flipped bit on the disk is not trained on.
payloads = Table(
    "payloads",
    metadata,
    Column("request_id", String, primary_key=True),
    Column("digest", LargeBinary, nullable=False),
    Column("data", LargeBinary, nullable=False),
)

outcomes = Table(
    "outcomes",
    metadata,
    Column("request_id", String, primary_key=True),
    Column("digest", LargeBinary, nullable=False),
    Column("data", LargeBinary, nullable=False),
)

# `moment`: the highest one of a row that was forgotten. `probes`: how often it was tried whether writing works.
counters = Table(
    "counters",
    metadata,
    Column("name", String, primary_key=True),
    Column("value", BigInteger, nullable=False),
)
