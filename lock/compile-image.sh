#!/usr/bin/env bash
# Writes lock/image.txt: every package of the image, pinned and hashed, wheels only, for CPython 3.12 on x86-64 Linux.
# torch and torchvision are PyTorch's CPU builds: PyPI's bring 3 GB of CUDA. TORCH_INDEX names a mirror of that index.
set -euo pipefail
cd "$(dirname "$0")/.."
torch=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
work=$(mktemp -d)
trap 'rm -r "$work"' EXIT
# What tests run with, without what the image has of its own.
own=$(grep -oE '^[a-z-]+' lock/image-constraints.txt | paste -sd '|')
grep -vE "^($own)==" lock/requirements.txt | sed 's/ --hash=.*//' > "$work/proved.txt"
.venv/bin/uv pip compile pyproject.toml --extra tpu --extra tracing \
  --constraints lock/image-constraints.txt --constraints "$work/proved.txt" \
  --python-version 3.12 --python-platform x86_64-manylinux_2_31 --no-build --no-config --format pylock.toml \
  --find-links "$torch/torch/" --find-links "$torch/torchvision/" --output-file "$work/pylock.toml" --quiet "$@"
.venv/bin/python -m tools.image_lock "$work/pylock.toml" > "$work/image.txt"
cp "$work/image.txt" lock/image.txt
