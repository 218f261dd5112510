"""Sessions, models, commands, their payloads and outcomes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "1"
down_revision = None


def upgrade() -> None:
    _people()
    _work()
    counters = op.create_table(
        "counters",
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("value", sa.BigInteger, nullable=False),
    )
    op.bulk_insert(counters, [{"name": "moment", "value": -1}, {"name": "probes", "value": 0}])


def _people() -> None:
    op.create_table(
        "sessions",
        sa.Column("session_id", sa.String, primary_key=True),
        sa.Column("tenant", sa.String, nullable=False),
        sa.Column("tags", sa.JSON, nullable=False),
        sa.Column("user_metadata", sa.JSON, nullable=False),
        sa.Column("sdk_version", sa.String),
        sa.Column("project_id", sa.String),
        sa.Column("display_name", sa.String),
        sa.Column("beats", sa.Boolean, nullable=False),
        sa.Column("created", sa.String, nullable=False),
        sa.Column("finish_reason", sa.String),
        sa.Column("finish_detail", sa.String),
        sa.Column("last_sign", sa.Double, nullable=False),
    )
    op.create_table(
        "models",
        sa.Column("model_id", sa.String, primary_key=True),
        sa.Column("session_id", sa.String, nullable=False),
        sa.Column("tenant", sa.String, nullable=False),
        sa.Column("number", sa.BigInteger, nullable=False),
        sa.Column("created", sa.String, nullable=False),
        sa.Column("last_request", sa.String, nullable=False),
        sa.Column("facts", sa.LargeBinary, nullable=False),
        sa.Column("snapshot", sa.String),
        sa.Column("snapshot_turn", sa.BigInteger, nullable=False),
        sa.Column("floor", sa.BigInteger, nullable=False),
        sa.Column("floor_turn", sa.BigInteger, nullable=False),
        sa.Column("is_over", sa.Boolean, nullable=False),
    )


def _work() -> None:
    op.create_table(
        "commands",
        sa.Column("request_id", sa.String, primary_key=True),
        sa.Column("model_id", sa.String, nullable=False),
        sa.Column("tenant", sa.String, nullable=False),
        sa.Column("moment", sa.BigInteger, nullable=False),
        sa.Column("seq_id", sa.BigInteger),
        sa.Column("key", sa.String),
        sa.Column("key_digest", sa.LargeBinary),
        sa.Column("fingerprint", sa.LargeBinary, nullable=False),
        sa.Column("operation", sa.String, nullable=False),
        sa.Column("request", sa.LargeBinary, nullable=False),
        sa.Column("payload_bytes", sa.BigInteger, nullable=False),
        sa.Column("accepted", sa.Double, nullable=False),
        sa.Column("attempts", sa.BigInteger, nullable=False),
        sa.Column("turn", sa.BigInteger),
        sa.Column("version", sa.String),
        sa.Column("finished", sa.Double),
        sa.Column("told_moment", sa.BigInteger),
        sa.Column("told", sa.Double),
    )
    op.create_index("commands_by_model", "commands", ["model_id", "turn"])
    for name in ("payloads", "outcomes"):
        op.create_table(
            name,
            sa.Column("request_id", sa.String, primary_key=True),
            sa.Column("digest", sa.LargeBinary, nullable=False),
            sa.Column("data", sa.LargeBinary, nullable=False),
        )
