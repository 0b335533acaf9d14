# Each target installs what it needs into .venv first. GNU make, Python >= 3.11. A line `target: ## text` is shown by `make help`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/installed
MODEL  ?= tiny-llama
ARGS   ?= --max-model-len 1024 --kv-cache-memory-bytes 268435456
RUNS   ?= 1
TARGET  ?= tar
SECONDS ?= 600
# More than one for each core, because the tests also wait; but each worker takes the memory of a vLLM.
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 6 ? n + n / 2 : 8)))
SERVING ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 2 ? n : 3)))
PYTEST  := $(BIN)/python -m pytest
# The quick tests wait more than they compute; but each worker collects all of them.
QUICK   ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 4 ? 2 * n : 8)))
# A file's tests share what is expensive to make. (By pytest-xdist 3.8, --dist loadgroup groups nothing under pytest 9.2.)
# The order of files is that of tests/conftest.py and tests/e2e/conftest.py; --no-loadscope-reorder retains it.
ORDERED := --dist loadfile --no-loadscope-reorder
# All but the real servers: their workers have a machine of their own each, whose one bundle and template their tests share.
SUITES  := $(filter-out tests/e2e/,$(sort $(wildcard tests/*/)))

# Those that import no vLLM, and which of them are quick.
CHECKED := tests/unit tests/attacks tests/adversarial tests/cli tests/fuzz tests/golden \
	tests/property/artifacts tests/property/core tests/property/graphs
SWIFT   := --ignore tests/unit/vllm -m "not vllm and not gpu and not slow and not nightly"
# `make check` leaves commands as processes and attacks to `make test`: they take most of the time of the quick tests.
FIRST   := $(filter-out tests/attacks tests/cli,$(CHECKED)) tests/cli/test_cli_help.py tests/cli/test_command_options.py

# The user's own bundles, keys and templates are neither used nor touched.
export COLDSTART_CACHE_DIR := $(CURDIR)/.cache/coldstart
export XDG_STATE_HOME := $(CURDIR)/.cache/state
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Without compiled modules every start would compile this package anew, and would be measured doing so.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install hooks lock demo demo-host test test-all check quick lint style types format typing docs bench fuzz dist clean

help: ## List the targets.
	@sed -n 's/^\([a-z-]*\):.* ## /\1	/p' $(firstword $(MAKEFILE_LIST)) | expand -t 12

install: $(STAMP) ## Create .venv with vLLM's CPU build and all development tools.

$(STAMP): requirements/cpu.lock requirements/torch-cuda.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' || \
		{ echo 'error: this is $(shell $(PYTHON) --version 2>&1); vLLM needs Python 3.11 to 3.14' >&2; \
		echo 'hint: make PYTHON=python3.12 $(MAKECMDGOALS)' >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --no-deps --require-hashes -r requirements/cpu.lock
	$(BIN)/python -m pip install --no-deps --no-build-isolation -e .
	$(BIN)/coldstart install cpu --constraint requirements/torch-cuda.lock
	@touch $@

hooks: $(STAMP) ## Install the pre-commit hooks; needs the program pre-commit.
	pre-commit install

lock: $(STAMP) ## Resolve requirements/*.lock and the digests of images; pins that still fit are retained.
	$(BIN)/python requirements/lock.py

demo: $(STAMP) ## Materialize a model and measure each start mode against stock vLLM.
	@if criu=$$(tests/tools/fetch-criu.sh); then export COLDSTART_CRIU="$$criu" snapshot=--snapshot; \
	else echo 'demo: without CRIU (see above) the snapshot row has no figures.' >&2; fi; \
	$(BIN)/python examples/demo.py --model $(MODEL) --runs $(RUNS) $$snapshot -- $(ARGS)

demo-host: $(STAMP) ## Serve two models from one endpoint in less memory than both need.
	$(BIN)/python examples/two_models.py

bench: RUNS = 7
bench: $(STAMP) ## Measure cold starts over seven runs and write build/bench.html.
	@mkdir -p build
	@criu=$$(tests/tools/fetch-criu.sh) && export COLDSTART_CRIU="$$criu"; set -x; \
	$(BIN)/coldstart bench $(MODEL) --runs $(RUNS) --export html=build/bench.html --export json=build/bench.json -- $(ARGS)

test: SELECT := -m 'not nightly'
test: lint ## Run lint and the tests, the end-to-end tests on real servers last.
	$(run_suites)

test-all: lint ## Run what `make test` runs, and the nightly tests.
	$(run_suites)

define run_suites
@criu=$$(tests/tools/fetch-criu.sh) && export COLDSTART_CRIU="$$criu"; \
PYTHON=$(BIN)/python tests/tools/fetch-chromium.sh >/dev/null || echo 'test: without Chromium (see above) the tests of pages are skipped.' >&2; \
PYTHON=$(BIN)/python tests/tools/fetch-helm.sh >/dev/null || echo 'test: without helm (see above) the tests that render the chart are skipped.' >&2; \
failed=0; $(PYTEST) -n $(QUICK) --dist loadfile $(SWIFT) $(CHECKED) || failed=1; \
$(PYTEST) -n $(WORKERS) $(ORDERED) $(SELECT) --after-quick '$(CHECKED)' $(SUITES) || failed=1; \
$(PYTEST) -n $(SERVING) $(ORDERED) $(SELECT) tests/e2e || failed=1; exit $$failed
endef

check: style ## Run lint and the quick unit tests, which need no vLLM.
	@$(MAKE) --no-print-directory -j 2 types quick

# The quick tests write many small files: into memory, where there is enough.
quick: export TMPDIR := $(shell test "$$(df --output=avail /dev/shm 2>/dev/null | tail -1)" -gt 2000000 2>/dev/null && echo /dev/shm || echo "$${TMPDIR:-/tmp}")
quick: $(STAMP)
	$(PYTEST) -n $(QUICK) --dist loadfile --hypothesis-profile quick $(SWIFT) $(FIRST)

lint: style types ## Check style, format, prose and types.

style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tests/tools/prose.py

types: $(STAMP) typing
	cd build/typing && ../../$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../mypy -p coldstart -p benchmarks \
		$(patsubst requirements/%.py,-m %,$(wildcard requirements/*.py))

format: $(STAMP) ## Sort imports, fix what ruff can fix, and format all files.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

typing: ## Link the packages as they install, the benchmarks and the scripts of requirements/, into build/typing, for mypy.
	@rm -rf build/typing && mkdir -p build/typing/coldstart
	@ln -s $(addprefix ../../../,$(filter-out %/__pycache__,$(wildcard coldstart/*)) artifacts commands) build/typing/coldstart/
	@ln -s ../../benchmarks $(addprefix ../../,$(wildcard requirements/*.py)) build/typing/

docs: $(STAMP) ## Build the documentation site in build/site; warnings are errors.
	$(BIN)/python docs/_tools/stage.py
	$(BIN)/python -m zensical build --strict

build/tools: requirements/tools.lock $(STAMP)
	rm -rf $@ $@.new
	$(BIN)/python -m pip install --quiet --no-deps --require-hashes --only-binary :all: --target $@.new -r $<
	mv $@.new $@

fuzz: build/tools ## Search inputs that break a reader: make fuzz TARGET=tar SECONDS=600; see CONTRIBUTING.md.
	PYTHONPATH=build/tools $(BIN)/python tests/fuzz/fuzz.py '$(TARGET)' -max_total_time='$(SECONDS)'

dist: build/tools ## Build wheel, sdist, SBOM and sums in dist/; RELEASE_KEY=FILE signs the sums.
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	RELEASE_KEY='$(RELEASE_KEY)' $(BIN)/python requirements/release.py write dist

clean: ## Remove build outputs and caches; .venv is retained.
	rm -rf build dist *.egg-info .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
