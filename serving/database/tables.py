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

# `times`: when each state began. `read_bytes`: how much of the input has rows in `lines`. `owner` works on the batch as long
# as it goes on changing `owned_until_s`. `model`: of all its good lines, where they have one. `usage`: the tokens of its
# answers, as `lines.usage` has them.
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
    Column("model", Text),
    Column("usage", JSON(none_as_null=True)),
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

# What a key used of a model's pool on a day of UTC, as "2026-11-22". This `key` is the first 12 digits of the hash alone, by which
# metrics and logs name it too.
USAGE = Table(
    "usage",
    METADATA,
    Column("key", String(16), primary_key=True),
    Column("day", String(10), primary_key=True),
    Column("model", Text, primary_key=True),
    Column("pool", Text, primary_key=True),
    Column("requests", BigInteger, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("output_tokens", BigInteger, nullable=False),
    Column("slice_seconds", Double, nullable=False),
    Column("dollars", Double, nullable=False),
    Index("usage_by_day", "day"),
)

# Each router process that tells of usage: the number of its last flush that is in `usage`, and when it was heard. `under_way` has the
# tokens that requests under way there may yet use, by the keys with a budget that ask it.
USAGE_ROUTERS = Table(
    "usage_routers",
    METADATA,
    Column("router", String(80), primary_key=True),
    Column("sequence", BigInteger, nullable=False),
    Column("heard_s", Double, nullable=False),
    Column("under_way", JSON, nullable=False),
)

# API keys. `id` is the hash of a key's first secret, and stays its name for files, batches and usage when it is rolled. `sha256` is
# the hash of the secret that lets in; the one before it does too until `previous_until_s`.
KEYS = Table(
    "keys",
    METADATA,
    Column("id", String(64), primary_key=True),
    Column("name", String(100), nullable=False, unique=True),
    Column("sha256", String(64), nullable=False),
    Column("previous_sha256", String(64)),
    Column("previous_until_s", Double),
    Column("limits", JSON, nullable=False),
    Column("created_s", Double, nullable=False),
)
