# `make serve` and `make test` are all a newcomer needs; everything bootstraps itself with python3 -m venv and pip.
PYTHON ?= python3
PORT ?= 8000
MODEL ?=
ARGS ?=
BIN := .venv/bin
STAMP := .venv/.installed
LINKS := .venv/.linked
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

# The strict editable install links file by file (so that mypy and editors see the folders as one package): a new or
# removed file needs the links made again, which takes a second. `.venv/.files` changes when the list does.
# The built page is left out: the server reads it where it lies.
FILES := $(shell find api fsm kernels actors server bench -type f ! -path '*/__pycache__/*' ! -path '*/prebuilt/*' ! -path '*/built/*' 2>/dev/null | LC_ALL=C sort)
ifneq ($(FILES),$(shell cat .venv/.files 2>/dev/null))
.PHONY: $(LINKS)
endif

# The page: what it is built of, the packages that build it, and the file that a build ends with.
WEBUI := $(shell find webui -type f ! -path 'webui/node_modules/*' ! -path 'webui/tests/*' 2>/dev/null)
MODULES := webui/node_modules/.package-lock.json
PAGE := server/page/built/index.html
TRIED := .venv/.webui

export OMP_WAIT_POLICY := passive

.PHONY: setup serve test test-serves test-kernels test-embeds test-simulates test-long check format lint types imports webui webui-check docs bench gpu-check wheel clients clean help

help:            ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 12

setup: $(LINKS) $(TRIED)  ## create .venv and install NovaInfer with its development tools into it

$(STAMP): pyproject.toml .ci/constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) install --upgrade "pip>=25.1" "setuptools>=77"
	$(PIP) install -c .ci/constraints.txt torch
	$(PIP) install -c .ci/constraints.txt --group dev -e .
	touch $@

$(LINKS): $(STAMP)
	rm -rf build
	$(PIP) install --no-deps --no-build-isolation -e . --config-settings editable_mode=strict 2>/dev/null
	$(BIN)/python -m novainfer.kernels.cpu.build
	@echo "$(FILES)" > .venv/.files
	@touch $@

# A machine without npm's registry has all but the page, and is asked for it no second time until webui/ changes.
$(TRIED): $(WEBUI) | $(LINKS)
	@$(MAKE) --no-print-directory $(PAGE) > .venv/webui.log 2>&1 || \
	    echo "The page at / was not built (.venv/webui.log says why); all else works. To try again: make webui"
	@touch $@

webui: $(PAGE)   ## build the page that is served at /: with this machine's Node, or else with one from PyPI

$(MODULES): webui/package-lock.json | $(STAMP)
	webui/with-node npm ci --no-audit --no-fund --loglevel=error --fetch-retries=1 --fetch-timeout=30000
	@touch $@

$(PAGE): $(WEBUI) $(MODULES)
	webui/with-node npm run --silent build -- --logLevel warn || (rm -f $@; exit 1)

serve: setup     ## serve the demo model (or MODEL=path) at http://127.0.0.1:$(PORT)
	$(BIN)/novainfer serve $(MODEL) --port $(PORT) $(ARGS)

# All of it runs in four parts, two beside each other at any time, as most tests keep one core. Each part says what it has
# found when it has ended, and none waits for what another has found. With ARGS it is one run.
SIMULATES := tests/simulation
KERNELS := tests/kernels
EMBEDS := tests/acceptance tests/actors tests/api tests/bench tests/deploy tests/docs tests/fsm
SERVES := $(filter-out $(SIMULATES) $(KERNELS) $(EMBEDS) %/__pycache__,$(patsubst %/,%,$(wildcard tests/*/)))
PARTS := test-serves test-kernels test-simulates test-embeds

test: setup      ## run every test that ends within CI's time
ifeq ($(ARGS),)
	@$(MAKE) --no-print-directory --jobs=2 --keep-going --output-sync=target $(PARTS)
else
	$(BIN)/python -m pytest -m "not long" $(ARGS)
endif

test-serves: FOLDERS = $(SERVES)
test-kernels: FOLDERS = $(KERNELS)
test-embeds: FOLDERS = $(EMBEDS)
test-simulates: FOLDERS = $(SIMULATES)

$(PARTS):
	$(BIN)/python -m pytest -m "not long" $(FOLDERS)

test-long: setup ## run everything, including what takes longer
	$(BIN)/python -m pytest $(ARGS)

clients: setup   ## the environments of other people's clients, which tests/clients drives
	$(BIN)/python tests/clients/environments.py $(ARGS)

check: format lint types imports webui-check test  ## what CI runs

format: setup
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror kernels/cpu/*.cpp kernels/cpu/*.h tests/kernels/cpu/*.cpp

lint: setup
	$(BIN)/ruff check .

types: setup
	$(BIN)/mypy

imports: setup
	$(BIN)/lint-imports

webui-check: setup
	@test -e $(MODULES) || echo "webui/ is not checked: its packages are not installed (make webui)"
	@test ! -e $(MODULES) || { cd webui && ./with-node npm run --silent format && ./with-node npm run --silent check && \
	    ./with-node npm run --silent test -- --passWithNoTests; }

docs: setup      ## write the generated pages again: state machines, the tree, the reference
	$(BIN)/python -m novainfer.fsm.diagram docs/machines.md
	$(BIN)/python docs/tree.py
	$(BIN)/python docs/reference.py

bench: setup     ## the benchmarks, with ratios to roofline and transformers
	$(BIN)/novainfer bench all $(ARGS)

# No venv and no network: what such a machine has is its own torch, and WHEELS is a folder of wheels for what it lacks.
gpu-check:       ## on a machine with a CUDA GPU: what is right, and how fast it is, into docs/benchmarks/gpu-*.json
	rm -rf .gpu && mkdir -p .gpu/novainfer
	ln -s $(CURDIR)/api/* $(addprefix $(CURDIR)/,fsm kernels actors server bench) .gpu/novainfer/
	$(if $(WHEELS),$(PYTHON) -m pip install --quiet --no-index --no-deps --no-compile --target .gpu $(WHEELS)/*.whl)
	PYTHONPATH=$(CURDIR)/.gpu $(PYTHON) -m novainfer.server.cli.main bench gpu-check $(ARGS)

# The libraries lie in the tree only while the wheel is made; the same commit gives the same bytes.
wheel: setup     ## make dist/*.whl, with the native kernels of every instruction set: no compiler where it is installed
	rm -rf build/lib build/bdist.* dist kernels/cpu/prebuilt
	$(BIN)/python -m novainfer.kernels.cpu.build kernels/cpu/prebuilt
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(PIP) wheel --no-deps --no-build-isolation --wheel-dir dist .
	rm -rf build/lib build/bdist.* kernels/cpu/prebuilt
	ls -l dist

clean:           ## remove the venv and caches
	rm -rf .venv .gpu .clients webui/node_modules server/page/built build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
