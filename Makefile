# Two commands do everything on a fresh machine with Python >= 3.11 and make:
#   make demo   set up, get the model, run a queue and a worker, print real answers
#   make test   set up, run every test

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ROOMS := mlx_rq jobs engine worker api_stub

# The strict editable install links every file where it would be in a wheel, so that mypy sees the
# packages (it runs in docs/, since the checkout's own mlx_rq/ is only the front door); folders are prerequisites because their times change when files come and go.
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check \
	--constraint constraints.txt --config-settings editable_mode=strict --editable

.PHONY: demo test lint format clean

demo: $(VENV)/.demo
	$(BIN)/mlx-rq demo

test: $(VENV)/.dev
	$(BIN)/pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	cd docs && ../$(BIN)/mypy --config-file ../pyproject.toml --cache-dir ../.mypy_cache

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build *.egg-info

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "mlx-rq needs Python 3.11 or newer; say which with: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt $(ROOMS) | $(BIN)/python
	$(INSTALL) '.[all]'
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt $(ROOMS) | $(BIN)/python
	$(INSTALL) '.[dev]'
	touch $@ $(VENV)/.demo
