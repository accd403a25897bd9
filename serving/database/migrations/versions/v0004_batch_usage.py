"""The model of a batch, and the tokens of its answers. A batch of an older version has neither."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("batches", sa.Column("model", sa.Text))
    op.add_column("batches", sa.Column("usage", sa.JSON))


def downgrade() -> None:
    for column in ("usage", "model"):
        op.drop_column("batches", column)
