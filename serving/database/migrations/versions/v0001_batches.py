"""Files and batches."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "files",
        sa.Column("id", sa.String(80), primary_key=True),
        sa.Column("key", sa.String(64), nullable=False),
        sa.Column("filename", sa.Text, nullable=False),
        sa.Column("purpose", sa.String(32), nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("created_s", sa.Double, nullable=False),
        sa.Column("expires_s", sa.Double),
    )
    op.create_index("files_of_key", "files", ["key", "created_s", "id"])
    op.create_table(
        "batches",
        sa.Column("id", sa.String(80), primary_key=True),
        sa.Column("key", sa.String(64), nullable=False),
        sa.Column("endpoint", sa.String(64), nullable=False),
        sa.Column("input_file_id", sa.String(80), nullable=False),
        sa.Column("completion_window", sa.String(16), nullable=False),
        sa.Column("metadata", sa.JSON),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("times", sa.JSON, nullable=False),
        sa.Column("created_s", sa.Double, nullable=False),
        sa.Column("expires_s", sa.Double, nullable=False),
        sa.Column("read_bytes", sa.BigInteger, nullable=False),
        sa.Column("total", sa.BigInteger, nullable=False),
        sa.Column("completed", sa.BigInteger, nullable=False),
        sa.Column("failed", sa.BigInteger, nullable=False),
        sa.Column("errors", sa.JSON),
        sa.Column("output_file_id", sa.String(80)),
        sa.Column("error_file_id", sa.String(80)),
        sa.Column("output_expires_after_s", sa.BigInteger),
        sa.Column("owner", sa.String(80)),
        sa.Column("owned_until_s", sa.Double, nullable=False),
    )
    op.create_index("batches_of_key", "batches", ["key", "created_s", "id"])
    op.create_index("batches_by_state", "batches", ["state", "created_s"])
    op.create_table(
        "lines",
        sa.Column("batch_id", sa.String(80), primary_key=True),
        sa.Column("line", sa.BigInteger, primary_key=True),
        sa.Column("custom_id", sa.Text),
        sa.Column("model", sa.Text),
        sa.Column("start", sa.BigInteger, nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("outcome", sa.String(16)),
        sa.Column("result", sa.Text),
    )
    op.create_index("lines_by_custom_id", "lines", ["batch_id", "custom_id"], unique=True)
    op.create_index("lines_to_do", "lines", ["batch_id", "outcome", "line"])


def downgrade() -> None:
    for table in ("lines", "batches", "files"):
        op.drop_table(table)
