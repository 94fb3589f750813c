# Two commands do all the set-up on a fresh machine: `make demo` and `make test`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROMPT ?=
ARGS ?=
WORKERS := --numprocesses 2

HERE := $(dir $(lastword $(MAKEFILE_LIST)))
# As typed: neither make nor the shell looks for quotes and dollars in it.
override export PROMPT := $(value PROMPT)

TARGETS := demo up test sweep lint bench
.PHONY: $(TARGETS)

ifneq ($(HERE),./)
# `make -f PATH/Makefile` from elsewhere.
$(TARGETS):
	@$(MAKE) --no-print-directory -C $(HERE) $@
else

# Starts a local cluster, answers one prompt (PROMPT="…"), stops the cluster.
demo: $(VENV)/.installed-rank
	$(BIN)/python -m cp_client.demo "$$PROMPT"

# Leaves the local cluster running in the foreground; ARGS="--port 50051 -tp 3" are flags of `kvloom up`.
up: $(VENV)/.installed-rank
	exec $(BIN)/kvloom up $(ARGS)

test: $(VENV)/.installed-dev
	$(BIN)/pytest $(WORKERS) --dist loadfile $(ARGS)

# The full products and the real-process matrix.
sweep: $(VENV)/.installed-dev
	$(BIN)/pytest -m "sweep and not gpu" $(WORKERS) --dist worksteal $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m cp_wire.lint

bench: $(VENV)/.installed-rank
	$(BIN)/kvloom bench layout
	$(BIN)/kvloom bench zigzag
	$(BIN)/kvloom bench pd-waste
	$(BIN)/kvloom bench collectives
	$(BIN)/kvloom bench transfer
	$(BIN)/kvloom bench second-token
	$(BIN)/kvloom bench decode

# Again only when pyproject.toml has changed.
$(VENV)/.installed-%: pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit("kvloom needs Python 3.11 or newer; %s is %d.%d. Name another one: make PYTHON=python3.12 …" % (sys.executable, v[0], v[1]) if v < (3, 11) else 0)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	@touch $@

endif
