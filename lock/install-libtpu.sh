#!/usr/bin/env bash
# install-libtpu.sh: the TPU's compiler as lock/libtpu.txt pins it, in ~/.cache/tpu-serving/libtpu-VERSION, where
# `serving compile` looks. Not in .venv: vLLM takes a machine where it can import libtpu for a TPU host.
set -euo pipefail
cd "$(dirname "$0")/.."
version=$(sed -n 's/^libtpu==\([^ ]*\).*/\1/p' lock/libtpu.txt)
folder=$HOME/.cache/tpu-serving/libtpu-$version
[ ! -f "$folder/libtpu/libtpu.so" ] || exit 0
mkdir -p "$(dirname "$folder")"
draft=$(mktemp -d "$folder.XXXX")
trap 'rm -rf "$draft"' EXIT
echo "installing libtpu $version into $folder (215 MB)"
.venv/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --require-hashes --only-binary :all: \
  --target "$draft" -r lock/libtpu.txt
chmod 755 "$draft"
mv -T "$draft" "$folder" || [ -f "$folder/libtpu/libtpu.so" ] # another one was quicker
