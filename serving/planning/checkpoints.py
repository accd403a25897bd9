"""Where a model's `config.json` comes from: a local folder, the library, Hugging Face's cache, or its site.

Only the last one needs a network; nothing but `config.json` is ever read. The variables are Hugging Face's own.
"""

import json
import os
from pathlib import Path
from typing import Any

import httpx

from serving.errors import PlanError
from serving.planning.library import CONFIGS

_FETCH_S = 5.0  # a plan answers or says why not while someone watches


def config_of(model: str) -> dict[str, Any]:
    """The config of a checkpoint folder or a Hugging Face id."""
    path = Path(model).expanduser()
    if path.is_dir():
        return _local(path)
    if model.startswith(("/", ".", "~")):
        raise PlanError(f"model path {model} does not exist")
    if "://" in model:
        raise PlanError(
            f"{model} is not read for a plan; give engine.hf_config_path: a Hugging Face id or a local path"
        )
    return CONFIGS.get(model) or _cached(model) or _fetched(model)


def _local(folder: Path) -> dict[str, Any]:
    if not (folder / "config.json").exists() and (folder / "adapter_config.json").exists():
        base = _read_json(folder / "adapter_config.json").get("base_model_name_or_path", "its base model")
        raise PlanError(
            f"model path {folder} is a LoRA adapter; serve {base} with engine.enable_lora and load it there"
        )
    return _read_json(folder / "config.json")


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


def _cached(model: str) -> dict[str, Any] | None:
    """The newest snapshot in Hugging Face's cache."""
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE", f"{home}/hub")).expanduser()
    found = sorted(
        hub.glob(f"models--{model.replace('/', '--')}/snapshots/*/config.json"),
        key=lambda path: path.stat().st_mtime,
    )
    return _read_json(found[-1]) if found else None


def _fetched(model: str) -> dict[str, Any]:
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        raise PlanError(_unknown(model, "HF_HUB_OFFLINE=1 forbids to ask Hugging Face"))
    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    token = os.environ.get("HF_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        answer = httpx.get(
            f"{hub}/{model}/resolve/main/config.json",
            headers=headers,
            follow_redirects=True,
            timeout=_FETCH_S,
        )
        answer.raise_for_status()
        config = answer.json()
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        why = "is gated: set HF_TOKEN" if status in (401, 403) else f"answers {status}"
        raise PlanError(_unknown(model, f"Hugging Face {why}")) from None
    except (httpx.HTTPError, ValueError) as error:
        raise PlanError(_unknown(model, f"Hugging Face can't be asked ({type(error).__name__})")) from None
    if not isinstance(config, dict):
        raise PlanError(_unknown(model, "its config.json is no config"))
    return config


def _unknown(model: str, why: str) -> str:
    return (
        f"no config.json is known for model {model!r} and {why}; give the path of a local checkpoint instead"
    )
