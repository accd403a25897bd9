"""A process that asks tpu-inference for its meshes: importing it changes torch for good.

Its first line of output has what the installed engine knows; after that each line of its input is a configuration, and each
line of its output ShardingConfigManager's sizes by axis, or {"error": its exception}.
"""

import json
import os
import sys
from types import SimpleNamespace
from typing import Any

from serving.simulation.cluster import HOST
from serving.simulation.cpu_tpu import register


def vllm_config(asked: dict[str, Any]) -> Any:
    return SimpleNamespace(
        additional_config=asked["additional_config"],
        parallel_config=SimpleNamespace(**asked["parallel"]),
        model_config=SimpleNamespace(
            use_mla=asked["latent"],
            dtype="bfloat16",
            get_total_num_kv_heads=lambda: asked["kv_heads"],
            get_head_size=lambda: asked["head_dim"],
        ),
        cache_config=SimpleNamespace(cache_dtype=asked["cache_dtype"]),
        lora_config=object() if asked["lora"] else None,
    )


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the engine prints where it likes
    os.environ.update(
        {"JAX_PLATFORMS": "cpu", HOST: "slice-0/0"}
    )  # it imports on a CPU only as on a simulated host
    register()
    from tpu_inference import envs
    from tpu_inference.layers.common import sharding

    known = {
        "axes": sharding.MESH_AXIS_NAMES,
        "short_axes": sharding.MESH_AXIS_NAMES_2D,
        "variables": list(envs.environment_variables),
    }
    print(json.dumps(known), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        for name in ("NEW_MODEL_DESIGN", "TPU_MULTIPROCESS_DP"):
            os.environ.pop(name, None)
        os.environ.update(asked["environment"])
        try:
            found = sharding.ShardingConfigManager.from_vllm_config(vllm_config(asked))
        except (ZeroDivisionError, AssertionError) as error:
            told: Any = {"error": type(error).__name__}
        else:
            sizes = (
                found.model_dp_size,
                found.attn_dp_size,
                found.attn_dp_expert_size,
                found.expert_size,
                found.tp_size,
                found.decode_cp_size,
                found.prefill_cp_size,
            )
            told = {"sizes": sizes, "devices": found.total_devices, "groups": found.total_dp_size}
        print(json.dumps(told), file=answers, flush=True)
        for name in asked["environment"]:
            os.environ.pop(name, None)


if __name__ == "__main__":
    main()
