"""Where a model's `config.json` comes from: a local folder, the known models, Hugging Face's cache, or its site.

Nothing else is read but modelopt's file beside it. The caller's `Hub` asks the site, so that a plan needs no network.
"""

import difflib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from serving.errors import PlanError
from serving.planning.known_models import CONFIGS, EMBED

# Where modelopt before 0.31 wrote what is `quantization_config` now.
QUANTIZATION_FILE = "hf_quant_config.json"
_HUB_ID = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?", re.ASCII)
# From a Hugging Face id to its config.json; raises PlanError.
Hub = Callable[[str], dict[str, Any]]


def no_hub(model: str) -> dict[str, Any]:
    """The hub of a caller that has no network."""
    raise unknown(model, "no site is asked here")


def config_of(model: str, hub: Hub = no_hub) -> dict[str, Any]:
    """The config of a checkpoint folder or a Hugging Face id."""
    if folder := folder_of(model):
        return _local(folder)
    if model.startswith(("/", ".", "~")):
        raise PlanError(f"model path {model} does not exist")
    if "://" in model:
        raise PlanError(
            f"{model} is not read for a plan; give engine.hf_config_path: a Hugging Face id or a local path"
        )
    if not _HUB_ID.fullmatch(model):
        raise unknown(model, "it is no Hugging Face id, as owner/name is one")
    return CONFIGS.get(model) or _cached(model) or hub(model)


def folder_of(model: str) -> Path | None:
    """The folder of that name, if there is one: some names no path can have."""
    return Path(model) if os.path.isdir(model) else None  # noqa: PTH112 -- Path's raises for a name too long


def _local(folder: Path) -> dict[str, Any]:
    if not (folder / "config.json").exists() and (folder / "adapter_config.json").exists():
        base = _read_json(folder / "adapter_config.json").get("base_model_name_or_path", "its base model")
        raise PlanError(
            f"model path {folder} is a LoRA adapter; serve {base} with engine.enable_lora and load it there"
        )
    return _whole(folder / "config.json")


def _whole(path: Path) -> dict[str, Any]:
    beside = path.parent / QUANTIZATION_FILE
    return with_quantization(_read_json(path), lambda: _read_json(beside) if beside.exists() else None)


def with_quantization(config: dict[str, Any], beside: Callable[[], dict[str, Any] | None]) -> dict[str, Any]:
    """A config with the quantisation that stands in a file beside it, as vLLM reads them (transformers_utils/config.py)."""
    if config.get("quantization_config") is None and (quantization := beside()) is not None:
        return {**config, "quantization_config": quantization}
    return config


def _read_json(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text())
    except OSError:
        raise PlanError(f"model path {path.parent} has no readable config.json") from None
    except ValueError as error:
        raise PlanError(f"{path} is not JSON: {error}") from None
    except RecursionError:
        raise PlanError(f"{path} is nested too deeply for a config") from None
    if not isinstance(config, dict):
        raise PlanError(f"{path} holds a {type(config).__name__}, not a config")
    return config


def hub_cache() -> Path:
    """Where Hugging Face's library keeps what it downloads."""
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    cache = os.environ.get("HF_HUB_CACHE", f"{home}/hub")
    return Path(os.path.expanduser(cache))  # noqa: PTH111 -- Path's raises for a user that is not known


def snapshot(model: str) -> Path | None:
    """The newest snapshot with weights of a model in that cache."""
    configs = _configs(model)
    return next((path.parent for path in reversed(configs) if [*path.parent.glob("*.safetensors")]), None)


def embeds(model: str) -> bool:
    """Whether a model's files are sentence-transformers', as far as they are known here."""
    folder = folder_of(model) or snapshot(model)
    return model in EMBED or (folder is not None and (folder / "modules.json").exists())


def _cached(model: str) -> dict[str, Any] | None:
    """The config of the newest snapshot in Hugging Face's cache."""
    configs = _configs(model)
    return _whole(configs[-1]) if configs else None


def _configs(model: str) -> list[Path]:
    if not _HUB_ID.fullmatch(model):
        return []
    return sorted(
        hub_cache().glob(f"models--{model.replace('/', '--')}/snapshots/*/config.json"),
        key=lambda path: path.stat().st_mtime,
    )


def unknown(model: str, why: str) -> PlanError:
    """The refusal of a model without a config: the known model that a typo stands for, else why there is none."""
    if meant := _typo_of(model):
        return PlanError(f"no model {model!r} is known and {why}; did you mean {meant!r}?")
    near = difflib.get_close_matches(model, CONFIGS, n=3, cutoff=0.8)
    return PlanError(
        f"no config.json is known for model {model!r} and {why}; give the path of a local checkpoint instead"
        + (f", or one of the known models of such a name: {', '.join(near)}" if near else "")
    )


def _typo_of(model: str) -> str | None:
    """The known model of nearly this name; other digits make another model, not a typo."""
    names = {name.rpartition("/")[2]: name for name in CONFIGS} | {name: name for name in CONFIGS}
    alike = {name.lower(): full for name, full in names.items() if _digits(name) == _digits(model)}
    near = difflib.get_close_matches(model.lower(), alike, n=1, cutoff=0.9)
    return alike[near[0]] if near else None


def _digits(name: str) -> list[str]:
    return re.findall(r"\d+", name)
