#!/usr/bin/env bash
# install.sh VENV LOCK: a virtual environment with the lock and this project in it.
set -euo pipefail
venv=$1 lock=$2
python=${PYTHON:-python3}
"$python" - <<'CHECK'
import sys
if not (3, 11) <= sys.version_info[:2] <= (3, 12):
    sys.exit(f"Python 3.11 or 3.12 is needed, {sys.version.split()[0]} was found; name another: make PYTHON=/path/to/python3.12")
CHECK
began=$SECONDS
say() { echo "install $((SECONDS - began)) s: $*"; }
[ -x "$venv/bin/python" ] || { say "virtual environment"; "$python" -m venv "$venv"; }
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
# Its wheel is another wherever it comes from, so that it alone is held to no hash.
torch=$(grep '^torch==' "$lock" | cut -d ' ' -f 1)
say "$torch"
pip install --quiet --no-deps "$torch" 2>/dev/null || pip install --no-deps --index-url "$TORCH_INDEX" "$torch"
say "$(grep -c '==' "$lock") pinned packages (3 GB on disk; about a minute on a fast network)"
rest=$(mktemp) uv=$(mktemp)
trap 'rm -f "$rest" "$uv"' EXIT
grep -v '^torch==' "$lock" > "$rest"
grep '^uv==' "$lock" > "$uv"
# uv takes 20 s where pip takes three minutes. It trusts what the system trusts, and knows no other setting of pip: where it fails pip tries.
pip install --quiet --no-deps --require-hashes -r "$uv"
# Without byte code every process of every start compiles vLLM, JAX and Ray anew where PYTHONDONTWRITEBYTECODE is set, and
# the first start does everywhere: 13 s of a core for each worker of an engine in place of 8.
"$venv/bin/uv" pip install --python "$venv/bin/python" --system-certs --no-deps --require-hashes --only-binary :all: --compile-bytecode -r "$rest" || {
  say "uv could not; pip takes about three minutes"
  pip install --no-deps --require-hashes --only-binary :all: --progress-bar off -r "$rest" |
    { grep --line-buffered -E '^(Collecting|Installing)' || true; } | # nothing where all of it is there
    awk '{ if (/^Collecting/) n++; if (n % 25 == 0 || /^Installing/) { print "  " n " collected"; fflush() } }' | uniq
}
say "tpu-serving"
pip install --quiet --no-deps --no-build-isolation -e .
"$venv/bin/python" -m compileall -q serving
say "done"
