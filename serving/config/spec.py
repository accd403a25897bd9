"""What every part of a service's settings is. Pure."""

from pydantic import BaseModel, ConfigDict


class Spec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def without_tilde(path: str | None) -> str | None:
    """A path of the YAML as it is; raises ValueError for one that only a shell understands."""
    if path and path.startswith("~"):
        raise ValueError("~ is for shells, and nothing else takes it for a home; write the path from / on")
    return path
