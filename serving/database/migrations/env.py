"""Alembic's entry: brings the database of the connection that it is given to the newest schema."""

from alembic import context

from serving.database.tables import METADATA

context.configure(
    connection=context.config.attributes["connection"], target_metadata=METADATA, transactional_ddl=True
)
# The connection is in a transaction of its caller's: a migration comes whole or not at all.
context.run_migrations()
