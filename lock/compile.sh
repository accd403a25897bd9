#!/usr/bin/env bash
# Writes lock/requirements.txt: every package of the `sim` and `dev` extras, pinned, wheels only, for Python 3.11 and 3.12.
# torch's CPU build is looked for where pip finds it (find-links), else on PyTorch's CPU index.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -n "${PIP_FIND_LINKS:-}" ]; then torch=(--find-links "$PIP_FIND_LINKS")
else torch=(--index https://download.pytorch.org/whl/cpu --index-strategy unsafe-best-match); fi
.venv/bin/uv pip compile pyproject.toml --extra sim --extra dev --overrides lock/overrides.txt \
  --universal --python-version 3.11 --no-build --no-annotate --no-header --no-emit-index-url \
  "${torch[@]}" --output-file lock/requirements.txt --quiet "$@"
# What the overrides ban stays in the universal resolution behind a marker that is never true: drop it.
grep -v "sys_platform == 'never'" lock/requirements.txt > lock/requirements.tmp
mv lock/requirements.tmp lock/requirements.txt
