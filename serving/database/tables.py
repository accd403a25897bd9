"""The tables of the database, as the newest migration leaves them. A test compares both.

Times are seconds since 1970. `key` is the SHA-256 of the API key whose row it is.
"""

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    Double,
    Index,
    MetaData,
    String,
    Table,
    Text,
)

METADATA = MetaData()

FILES = Table(
    "files",
    METADATA,
    Column("id", String(80), primary_key=True),
    Column("key", String(64), nullable=False),
    Column("filename", Text, nullable=False),
    Column("purpose", String(32), nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("state", String(16), nullable=False),
    Column("created_s", Double, nullable=False),
    Column("expires_s", Double),
    Index("files_of_key", "key", "created_s", "id"),
)

# `times`: when each state began. `read_bytes`: how much of the input has rows in `lines`. `owner` works on the batch until
# `owned_until_s`, unless it says again that it does.
BATCHES = Table(
    "batches",
    METADATA,
    Column("id", String(80), primary_key=True),
    Column("key", String(64), nullable=False),
    Column("endpoint", String(64), nullable=False),
    Column("input_file_id", String(80), nullable=False),
    Column("completion_window", String(16), nullable=False),
    Column("metadata", JSON),
    Column("state", String(16), nullable=False),
    Column("times", JSON, nullable=False),
    Column("created_s", Double, nullable=False),
    Column("expires_s", Double, nullable=False),
    Column("read_bytes", BigInteger, nullable=False),
    Column("total", BigInteger, nullable=False),
    Column("completed", BigInteger, nullable=False),
    Column("failed", BigInteger, nullable=False),
    Column("errors", JSON),
    Column("output_file_id", String(80)),
    Column("error_file_id", String(80)),
    Column("output_expires_after_s", BigInteger),
    Column("owner", String(80)),
    Column("owned_until_s", Double, nullable=False),
    Index("batches_of_key", "key", "created_s", "id"),
    Index("batches_by_state", "state", "created_s"),
)

# A line of a batch's input, and its result once there is one. `start` and `bytes`: its place in the file.
LINES = Table(
    "lines",
    METADATA,
    Column("batch_id", String(80), primary_key=True),
    Column("line", BigInteger, primary_key=True),
    Column("custom_id", Text),
    Column("model", Text),
    Column("start", BigInteger, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("outcome", String(16)),
    Column("result", Text),
    Index("lines_by_custom_id", "batch_id", "custom_id", unique=True),
    Index("lines_to_do", "batch_id", "outcome", "line"),
)
