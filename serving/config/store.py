"""Where files, batches and usage stay, and how much of them. Pure."""

import re
from typing import Self

from pydantic import Field, field_validator, model_validator

from serving.config.spec import Spec, without_tilde


class StoreSpec(Spec):
    """Where files, batches and usage stay. A folder on the head's disk may stand alone: the database is a file in it, as are the files."""

    folder: str | None = Field(
        default=None,
        min_length=1,
        description="Folder on a disk of the head's own, made where there is none: `store.sqlite` and `files/`.",
    )
    database: str | None = Field(
        default=None,
        description="postgresql://USER@HOST/NAME instead of SQLite, where several heads share it; the password by PGPASSWORD.",
    )
    files: str | None = Field(
        default=None,
        min_length=1,
        description="Another folder for files, or any URL of fsspec, as gs://BUCKET/FOLDER.",
    )

    _without_tilde = field_validator("folder", "files")(without_tilde)

    @field_validator("database")
    @classmethod
    def _is_postgres(cls, value: str | None) -> str | None:
        if value is None or re.match(r"postgres(ql)?://", value):
            return value
        raise ValueError("postgresql://USER@HOST/NAME is needed; SQLite is a file in `folder`")

    @model_validator(mode="after")
    def _has_a_place(self) -> Self:
        if self.folder is None and not (self.database and self.files):
            raise ValueError("name a folder, or both database and files")
        return self

    @property
    def database_at(self) -> str:
        return self.database or f"{self.folder}/store.sqlite"

    @property
    def files_at(self) -> str:
        return self.files or f"{self.folder}/files"


class BatchSpec(Spec):
    """Limits of /v1/files and /v1/batches; they need `store`."""

    max_file_bytes: int = Field(default=200 << 20, ge=1 << 10, description="Largest file of input.")
    max_key_bytes: int = Field(
        default=10 << 30, ge=1 << 10, description="All files of one API key, results among them."
    )
    max_lines: int = Field(default=50_000, ge=1, description="Most lines of one batch.")
    max_open: int = Field(default=100, ge=1, description="Most batches of one API key that are not over.")
    max_age_s: float = Field(
        default=30 * 86400, ge=3600, description="Seconds that a file stays, and a batch that is over."
    )
    max_window_s: float = Field(
        default=7 * 86400, ge=3600, description="Longest completion window that a client may ask for."
    )
    spare: float = Field(
        default=0.1,
        ge=0,
        lt=1,
        description="Share of a model's seats that batches leave free, so that the next request waits for none.",
    )
    ttft_p99_s: float | None = Field(
        default=None,
        gt=0,
        description="Seconds to the first token that 99 of 100 requests see beside batches: lines are read as slowly as that takes.",
    )
    may_scale: bool = Field(
        default=False,
        description="Whether slices are ordered for batches, and woken from zero; else batches only use seats that are free.",
    )
    deadline_s: float | None = Field(
        default=None,
        gt=0,
        description="With may_scale, seconds within which a batch is to be done; its completion window where this is not set.",
    )

    @model_validator(mode="after")
    def _deadline_of_what_scales(self) -> Self:
        if self.deadline_s is not None and not self.may_scale:
            raise ValueError("deadline_s is for batches that slices are ordered for; set may_scale: true too")
        return self
