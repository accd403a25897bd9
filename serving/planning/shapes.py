"""What a checkpoint's `config.json` says about its size, read without loading anything.

A model id that looks like a path is one; any other is looked up in the library of known configs.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.errors import PlanError
from serving.planning.library import CONFIGS


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a decoder that decide how it can be cut up."""

    architecture: str
    hidden_size: int
    layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int


def shape_of(model: str, overrides: Mapping[str, Any] | None = None) -> ModelShape:
    """The shape of a local checkpoint or a known model id; overrides are vLLM's `hf_overrides`."""
    return read_config(_config_of(model) | dict(overrides or {}), where=model)


def read_config(config: Mapping[str, Any], where: str) -> ModelShape:
    """The shape a config describes. Multimodal wrappers keep the decoder under `text_config`."""
    text = config.get("text_config", config)
    heads = _number(text, "num_attention_heads", where)
    hidden = _number(text, "hidden_size", where)
    return ModelShape(
        architecture=_architecture(config, where),
        hidden_size=hidden,
        layers=_number(text, "num_hidden_layers", where),
        num_attention_heads=heads,
        num_key_value_heads=_number(text, "num_key_value_heads", where, default=heads),
        head_dim=_number(text, "head_dim", where, default=hidden // heads),
        vocab_size=_number(text, "vocab_size", where),
        max_position_embeddings=_number(text, "max_position_embeddings", where),
    )


def _config_of(model: str) -> dict[str, Any]:
    path = Path(model).expanduser()
    if path.is_dir():
        return _read_json(path / "config.json")
    if model.startswith(("/", ".", "~")):
        raise PlanError(f"model path {model} does not exist")
    if model in CONFIGS:
        return CONFIGS[model]
    raise PlanError(
        f"no config.json is known for model {model!r}; give the path of a local checkpoint instead"
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text())
    except OSError:
        raise PlanError(f"model path {path.parent} has no readable config.json") from None
    except ValueError as error:
        raise PlanError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise PlanError(f"{path} holds a {type(config).__name__}, not a config")
    return config


def _architecture(config: Mapping[str, Any], where: str) -> str:
    match config.get("architectures"):
        case [str(name), *_]:
            return name
        case _:
            raise PlanError(_missing("architectures", where))


def _number(config: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise PlanError(_missing(key, where))
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise PlanError(f"config.json of {where}: {key} is {value!r}, not a number of at least 1")
    return value


def _missing(key: str, where: str) -> str:
    return f"config.json of {where} has no {key}; give it as engine.hf_overrides.{key}"
