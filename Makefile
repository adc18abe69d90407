# Two commands do everything on a fresh machine with Python >= 3.11 and make:
#   make demo   set up, get the model, run a queue and a worker, print real answers
#   make test   set up, run every test

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check \
	--constraint constraints.txt --editable

.PHONY: demo test test-page test-clients families performance pictures docs lint format clean

demo: $(VENV)/.demo
	$(BIN)/mlx-rq demo

test: $(VENV)/.dev
	$(BIN)/pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder

# The HTTP server's page in the system's Chromium (Debian: chromium-headless-shell), which also takes
# the pictures in docs/images/. Fails where there is none.
test-page: $(VENV)/.dev
	$(INSTALL) '.[browser]'
	$(BIN)/pytest tests/browser/page.py

# Which models of mlx-lm are batched, and how: fails where that is not what the page says.
families: $(VENV)/.dev
	$(BIN)/python tests/engine/families.py
	git diff --exit-code docs/families.md engine/models/families.json

# Measures this machine with `mlx-rq bench`, and writes the figures of docs/performance.md.
performance: $(VENV)/.dev
	$(BIN)/python bench/performance.py

# Takes the pictures of terminals in docs/images/.
pictures: $(VENV)/.dev
	$(BIN)/python docs/terminals.py

# Other people's clients, each installed in an environment of its own below .clients/; it takes a
# while, and writes docs/clients/index.md.
test-clients: $(VENV)/.dev
	$(BIN)/python tests/clients/matrix.py

# The pages as a site, in build/site/; fails where a link leads nowhere. Not --quiet: warnings would not
# count then. (The variable silences what is said of the next major version of mkdocs.)
docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache --no-logo
	@# A mypy that looks at a part of the package only says "Success", too: count the files.
	$(BIN)/mypy | tee /dev/stderr | \
		grep -q "^Success: no issues found in $$(find -L mlx_rq -name '*.py' | wc -l) source files"
	@# Nothing else tells that a benchmark does not fit the code any more.
	MYPYPATH=tests:tests/engine:tests/reliability $(BIN)/mypy --follow-imports silent \
		bench docs/site.py docs/terminals.py

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .clients build *.egg-info

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "mlx-rq needs Python 3.11 or newer; say which with: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) '.[all]'
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) '.[dev]'
	touch $@ $(VENV)/.demo
