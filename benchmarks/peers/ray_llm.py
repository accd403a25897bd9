"""ray.serve.llm with one model until it is killed. Runs in the environment of ray-llm.txt, not in the project's.

python ray_llm.py FOLDER MODEL PORT TMPDIR OPTIONS
"""

import json
import sys
import time

import ray
from ray import serve
from ray.serve.llm import LLMConfig, build_openai_app


def main() -> None:
    folder, model, port, directory, options = sys.argv[1:]
    # Four times the cores that there are: replicas ask for whole ones.
    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        object_store_memory=80 << 20,
        _temp_dir=directory,
    )
    serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
    config = LLMConfig(
        model_loading_config={"model_id": model, "model_source": folder},
        accelerator_config={"kind": "cpu"},
        deployment_config={"num_replicas": 1},
        engine_kwargs=json.loads(options),
    )
    serve.run(build_openai_app({"llm_configs": [config]}), blocking=False)
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    main()
