# penstock: every habit is one target. `make help` lists them; continuous integration runs the same ones.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
  if command -v $$p >/dev/null && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo $$p; break; fi; done)
BIN := .venv/bin
PINS := requirements/build.txt requirements/dev.txt pyproject.toml
STAMP := .venv/.installed-$(shell cat $(PINS) | sha256sum | cut -c1-16)
SUITES := $(BIN)/python -m tools.suites

.PHONY: help setup core wheel release system programs jars demo test fmt lint types unit faults interop end_to_end spark docs interpreted bench nightly simulate audit lock proto reference screenshots clean

help: ## List the targets
	@grep -hE '^[a-z_]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'
	@echo "  make lint | types | unit | faults | interop | end_to_end | spark | docs | interpreted    one suite of make test"

setup: $(STAMP) ## Make .venv and install everything, pinned by version and hash
	@$(BIN)/python -m compileall -q src  # else each process compiles all modules where PYTHONDONTWRITEBYTECODE is set

$(STAMP):
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 or newer was found: install one, or name it: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@echo "make: installing into .venv, pinned by version and hash; the first time this takes a minute or two"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/build.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes --no-build-isolation -r requirements/dev.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@rm -f .venv/.installed-*
	@$(BIN)/python tools/core.py
	@$(BIN)/python tools/console_libraries.py || true
	@touch $@
	@echo 'make: done; for the command penstock in this shell: export PATH="$(CURDIR)/.venv/bin:$$PATH"'

core: setup ## Compile the core for this checkout, if its sources have changed
	@$(BIN)/python tools/core.py
	@$(BIN)/python tools/console_libraries.py || true

wheel: setup ## Build the wheels that are released, for this platform and without compiled code, into dist (GCC, six minutes)
	@rm -rf build/wheel
	PENSTOCK_BUILD=release $(BIN)/python -m hatchling build --target wheel --directory build/wheel
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m auditwheel repair --wheel-dir dist build/wheel/*.whl
	PENSTOCK_BUILD=pure $(BIN)/python -m hatchling build --target wheel --directory dist

release: setup ## Build, describe and check the distributions of a release of this platform, in dist/release; publishes nothing
	@$(BIN)/python -m tools.release $(ARGS)

system: ## Install the Debian packages that the interop tests use (needs apt and root)
	@bash tools/system.sh requirements/debian.txt

programs: setup ## Prepare the Go, Java and Rust programs of the tests, in the user's cache folder
	$(BIN)/python -m tests.interop.programs

jars: setup ## Fetch Delta Lake and s3a for the installed Spark with Maven, once, into the user's cache folder
	$(BIN)/python -m penstock.spark.environment.jars

demo: setup ## See real telemetry travel the whole way: MQTT, tube log, Spark, lake table, state store
	$(BIN)/penstock demo $(ARGS)

test: core ## Everything a change must pass: format, lint, types, all suites, documentation
	@$(SUITES) --all

fmt: setup ## Format the tree and fix what lint can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lint types unit faults interop end_to_end spark interpreted: core
	@$(SUITES) $@

docs: core
	@$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build/html
	@$(SUITES) $@

bench: setup ## Benchmarks beside a named peer; results as JSON under benchmarks/results
	$(BIN)/python -m benchmarks $(ARGS)

nightly: setup ## Tests that repeat or wait: all, or one part (PART=unit|interpreted|faults|interop|end_to_end|spark|docs|simulation|two-nodes|fuzz|cluster|audit), 45 minutes at most each
	@$(BIN)/python -m tools.nightly $(PART)

simulate: core ## Simulate nodes under faults with the seeds FIRST to LAST: SEEDS=FIRST-LAST, or their number
	@$(BIN)/python -m tests.simulation $(SEEDS)

audit: setup ## Look for known vulnerabilities of the pinned packages (needs the internet)
	@$(BIN)/python -m tools.audit

lock: ## Pin requirements/*.in with hashes; versions that are still permitted stay, ARGS=--upgrade takes the newest ones
	@bash tools/lock.sh "$(PYTHON)" $(ARGS)

proto: ## Generate the Protobuf messages from our .proto files
	@bash tools/proto.sh "$(PYTHON)"

reference: setup ## Write the reference pages that have their source in the code
	@$(BIN)/python tools/reference.py

screenshots: core ## Take the screenshots of the documentation again (needs Chromium)
	@$(BIN)/python -m tools.screenshots

clean: ## Remove the environment and what tests and builds left
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache docs/_build
