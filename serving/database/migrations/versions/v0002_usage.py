"""What keys have used, and how far each router's flushes are in it."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "usage",
        sa.Column("key", sa.String(16), primary_key=True),
        sa.Column("day", sa.String(10), primary_key=True),
        sa.Column("model", sa.Text, primary_key=True),
        sa.Column("pool", sa.Text, primary_key=True),
        sa.Column("requests", sa.BigInteger, nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("cached_tokens", sa.BigInteger, nullable=False),
        sa.Column("output_tokens", sa.BigInteger, nullable=False),
        sa.Column("slice_seconds", sa.Double, nullable=False),
        sa.Column("dollars", sa.Double, nullable=False),
    )
    op.create_index("usage_by_day", "usage", ["day"])
    op.create_table(
        "usage_routers",
        sa.Column("router", sa.String(80), primary_key=True),
        sa.Column("sequence", sa.BigInteger, nullable=False),
        sa.Column("heard_s", sa.Double, nullable=False),
        sa.Column("under_way", sa.JSON, nullable=False),
    )


def downgrade() -> None:
    for table in ("usage_routers", "usage"):
        op.drop_table(table)
