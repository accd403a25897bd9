"""The LoRA adapters of a model, from `engine.lora_modules`; clients request an adapter by name, like a model."""

import json
from collections.abc import Mapping
from typing import Any

from serving.errors import ConfigError


def adapters(engine: Mapping[str, Any]) -> dict[str, str]:
    """Adapter paths by name, in either of vLLM's two notations; raises ConfigError."""
    modules = engine.get("lora_modules") or []
    if not isinstance(modules, list):
        raise ConfigError("engine.lora_modules: a list is needed, of NAME=PATH or {name: NAME, path: PATH}")
    paths: dict[str, str] = {}
    for module in modules:
        name, path = _parts(module)
        if not name or not path:
            raise ConfigError(
                f"engine.lora_modules: NAME=PATH or {{name: NAME, path: PATH}} is needed (got {module!r})"
            )
        if not name.isprintable():
            raise ConfigError(f"engine.lora_modules: the name {name!a} has control characters")
        if name in paths:
            raise ConfigError(f"engine.lora_modules: two adapters are named {name!r}; give each its own name")
        if (
            "://" in path
        ):  # it takes the URL for a repository's id (vllm/lora/utils.py), and streams weights of models alone
            raise ConfigError(
                f"engine.lora_modules: vLLM reads adapter {name!r} from no URL (got {path}); name a Hugging Face id or a folder, as one in a "
                "mounted bucket: gke.weights_bucket"
            )
        paths[name] = path
    if paths and not engine.get("enable_lora"):
        raise ConfigError("engine.lora_modules: adapters need engine.enable_lora: true")
    return paths


def leaves_experts_out(engine: Mapping[str, Any]) -> bool:
    """Whether `lora_target_modules` names modules, none of them experts, for which tpu-inference 0.26 has no adapters.

    vLLM's FusedMoEWithLoRA refuses the kernels of tpu-inference (`is_monolithic`).
    """
    modules = engine.get("lora_target_modules")
    return isinstance(modules, list) and bool(modules) and not any("expert" in str(name) for name in modules)


def flag_values(engine: Mapping[str, Any]) -> list[str]:
    """The adapters as vLLM's command line takes them."""
    return [json.dumps({"name": name, "path": path}) for name, path in adapters(engine).items()]


def _parts(module: Any) -> tuple[str, str]:
    if isinstance(module, str):
        name, _, path = module.partition("=")
        return name, path
    if isinstance(module, dict) and module.keys() == {"name", "path"}:
        return str(module["name"]), str(module["path"])
    return "", ""
