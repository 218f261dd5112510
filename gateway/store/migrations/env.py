"""What Alembic runs around the migrations: over the connection it is given, inside that one's transaction."""

from __future__ import annotations

from alembic import context

context.configure(connection=context.config.attributes["connection"])
context.run_migrations()
