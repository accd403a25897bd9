"""API keys that are added, rolled and revoked while the service runs."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.create_table(
        "keys",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("name", sa.String(100), nullable=False, unique=True),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("previous_sha256", sa.String(64)),
        sa.Column("previous_until_s", sa.Double),
        sa.Column("limits", sa.JSON, nullable=False),
        sa.Column("created_s", sa.Double, nullable=False),
    )


def downgrade() -> None:
    op.drop_table("keys")
