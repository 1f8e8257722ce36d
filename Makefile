# Each target sets up what it needs from nothing: a virtual environment in $(VENV), installed again whenever pyproject.toml or the
# version changes. `make VENV=path test` uses another environment, for example the active one: `make VENV=$VIRTUAL_ENV test`.
PYTHON ?= python3
VENV ?= .venv
EXAMPLE ?= examples/tiny-glm53-flash
DEMO ?= .demo

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
INPUTS := pyproject.toml glm5next_jax/__init__.py

.PHONY: demo test lint oracle clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed-run
	rm -rf $(DEMO) && mkdir -p $(DEMO)
	$(BIN)/glm5next-convert $(EXAMPLE) $(DEMO)/model
	$(BIN)/glm5next-generate --model $(DEMO)/model --input examples/prompts.jsonl --output $(DEMO)/answers.jsonl
	cat $(DEMO)/answers.jsonl

test: $(VENV)/.installed-test
	JAX_PLATFORMS=$${JAX_PLATFORMS:-cpu} $(BIN)/python -m pytest -q --numprocesses auto --dist worksteal $(PYTEST_ARGS)

oracle: $(VENV)/.installed-oracle
	JAX_PLATFORMS=$${JAX_PLATFORMS:-cpu} $(BIN)/python -m pytest -q -m oracle --numprocesses auto --dist worksteal $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --pythonpath $(BIN)/python

clean:
	rm -rf .venv .demo .ci-work.* build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find convert glm5next_jax pallas_kernels tests -name __pycache__ -type d -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The plain project first; each extra adds to it.
$(VENV)/.installed-run: $(INPUTS) | $(BIN)/python
	$(PIP) --editable .
	touch $@

$(VENV)/.installed-%: $(INPUTS) | $(BIN)/python
	$(PIP) --editable ".[$*]"
	touch $@ $(VENV)/.installed-run
