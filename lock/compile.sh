#!/usr/bin/env bash
# Writes lock/requirements.txt: every package of the `sim` and `dev` extras, pinned, with the hashes of its wheels, for
# Python 3.11 and 3.12; a line a package. Then lock/tools.txt, the same of lock/tools.in: what audits the other locks. And
# lock/libtpu.txt: the TPU's compiler.
# torch's CPU build is looked for where pip finds it (find-links), else on PyTorch's CPU index.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -n "${PIP_FIND_LINKS:-}" ]; then torch=(--find-links "$PIP_FIND_LINKS")
else torch=(--index https://download.pytorch.org/whl/cpu --index-strategy unsafe-best-match); fi
work=$(mktemp -d)
trap 'rm -r "$work"' EXIT
# compiled LOCK ARGUMENTS...: what is in the lock stays, unless the arguments say otherwise.
compiled() {
  local lock=$1
  cp "$lock" "$work/lock.txt" 2>/dev/null || true
  .venv/bin/uv pip compile "${@:2}" --universal --python-version 3.11 --no-build --no-annotate --no-header \
    --no-emit-index-url --generate-hashes --output-file "$work/lock.txt" --quiet
  # What the overrides ban stays in the universal resolution behind a marker that is never true: drop it.
  sed -e ':a' -e '/\\$/N; s/ *\\\n */ /; ta' "$work/lock.txt" | grep -v "sys_platform == 'never'" > "$lock"
}
compiled lock/requirements.txt pyproject.toml --extra sim --extra dev --overrides lock/overrides.txt "${torch[@]}" "$@"
compiled lock/tools.txt lock/tools.in "$@"
compiled lock/libtpu.txt pyproject.toml --extra compile --no-deps "$@"
sed -i '/^libtpu==/!d' lock/libtpu.txt # the extra's own line: what it needs is in the other lock
