#!/usr/bin/env bash
# audit.sh audit: every lock against the known vulnerabilities of PyPI, or of OSV where PyPI's can't be read. Status 0: none is
# known; 1: some are, and are listed; 2: nothing was audited, because neither service answers.
# audit.sh sbom: dist/sbom-image.json and dist/sbom-requirements.json, what is in the image and in .venv, as CycloneDX.
set -euo pipefail
cd "$(dirname "$0")/.."
tools=.run/audit-tools
if [ ! -f "$tools/installed" ] || [ lock/tools.txt -nt "$tools/installed" ]; then
  .venv/bin/uv venv --quiet --clear --python .venv/bin/python "$tools"
  .venv/bin/uv pip install --quiet --python "$tools/bin/python" --no-deps --require-hashes --only-binary :all: -r lock/tools.txt
  touch "$tools/installed"
fi

answers() { # answers URL: whether it gives JSON
  "$tools/bin/python" - "$1" << 'ASK'
import json, sys, urllib.request
try:
    with urllib.request.urlopen(sys.argv[1], timeout=20) as answer:
        json.load(answer)
except (OSError, ValueError) as error:
    sys.exit(f"{sys.argv[1]}: {error}")
ASK
}

case $1 in
  audit)
    if answers https://pypi.org/pypi/pip/25.0/json; then service=pypi
    elif answers https://api.osv.dev/v1/vulns/PYSEC-2021-142; then service=osv
    else
      echo "audit: nothing was audited: neither PyPI's nor OSV's record of vulnerabilities can be read from here" >&2
      exit 2
    fi
    status=0
    for lock in lock/requirements.txt lock/image.txt lock/tools.txt lock/libtpu.txt; do
      echo "audit: $lock, by $service"
      "$tools/bin/pip-audit" --requirement "$lock" --no-deps --disable-pip --progress-spinner off \
        --vulnerability-service "$service" || status=1
    done
    exit $status ;;
  sbom)
    mkdir -p dist
    for lock in image requirements; do
      "$tools/bin/cyclonedx-py" requirements "lock/$lock.txt" --pyproject pyproject.toml --mc-type application \
        --output-reproducible --output-format JSON --output-file "dist/sbom-$lock.json"
      echo "sbom: dist/sbom-$lock.json"
    done ;;
  *) echo "audit.sh audit | sbom" >&2; exit 64 ;;
esac
