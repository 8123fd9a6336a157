# Every target sets up what it needs: a virtual environment in .venv, pinned by requirements.lock.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ENGINES := .venv-engines
CLIENTS ?= litellm langchain aiperf guidellm node
READY := $(VENV)/.ready
# At most three tests that fail are run a second time, and the summary names them with their tracebacks: CONTRIBUTING.md.
RERUN := --reruns 1 --reruns-delay 5 --max-suite-reruns 3 --rerun-show-tracebacks
SRC := warmroute.py warmroute_man.py warmroute_names.py warmroute_tls.py warmroute_yaml.py policies proxy launch replayer sim bench tests

# Tests start hundreds of processes: byte code is kept, also where the environment asks Python not to write any.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup collected collector helm compose-loader compose-podman test-compose api-server ray test-ray monitoring-tools store demo demo-ui browser test-ui test lint format types imports unit test-fleets engines test-engines test-clients test-package audit soak bench-data-plane tournament analysis-docs reference docs docs-serve docs-version docs-figures lock clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

QUIET := --quiet --disable-pip-version-check
# $(call install,PYTHON,WHAT,OPTIONS OF UV): uv takes seconds where pip takes two minutes. It does not read pip's settings, so
# where it finds no registry pip installs.
install = $(BIN)/uv pip install --quiet --python $(1) $(2) $(3) || $(1) -m pip install $(QUIET) $(2)

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "warmroute needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	sed -n '/^uv==/,/[^\\]$$/p' requirements.lock > $(VENV)/uv.txt
	$(BIN)/python -m pip install $(QUIET) --require-hashes --no-deps --requirement $(VENV)/uv.txt
	$(call install,$(BIN)/python,--require-hashes --no-deps --requirement requirements.lock,--compile-bytecode)
	$(BIN)/python -m pip install $(QUIET) --no-build-isolation --no-deps --editable .
	@touch $@

setup: $(READY) ## create .venv with everything the project needs

demo: $(READY) ## 8 simulated engines, five policies, one verdict (under 4 minutes)
	$(BIN)/warmroute demo

demo-ui: $(READY) ## simulated engines with endless traffic, and the dashboard's address; Ctrl-C ends it
	$(BIN)/warmroute demo --ui

lint: $(READY) ## ruff: format and rules
	$(BIN)/ruff format --check $(SRC)
	$(BIN)/ruff check $(SRC)

format: $(READY) ## rewrite the sources in the house format
	$(BIN)/ruff format $(SRC)
	$(BIN)/ruff check --fix $(SRC)

types: $(READY) ## mypy, strict
	$(BIN)/mypy

imports: $(READY) ## which folder may import which
	$(BIN)/lint-imports

# Each file is run by one process, which makes its fixtures once; `loadgroup` groups nothing with pytest 9.2
# (pytest-xdist issue 1386). In the order of collection, as files of few tests can be slow; the longest are marked `first`.
BY_FILE := --dist loadfile --no-loadscope-reorder $(RERUN)
PYTEST := $(BIN)/python -m pytest -n 4 --ignore tests/ui $(BY_FILE)
# The files that have tests with a marker: each process would take 13 s to collect all.
with_marker = $(shell grep -rlw 'mark\.$(1)' --include='test_*.py' tests | sort)

# Collect every test once: in a fresh clone each of pytest's processes would compile all files, 20 s of a processor each.
collected: $(READY)
	@$(PYTEST) -n 0 --collect-only -q > $(VENV)/collected.txt 2>&1 || { cat $(VENV)/collected.txt; exit 1; }

unit: $(READY) ## pytest only
	$(PYTEST) -m "not fleet and not quiet and not ui"

test-fleets: $(READY) ## the tests that are slow since they start engines, proxies and launchers
	$(PYTEST) -n 5 -m "fleet and not quiet and not ui" $(call with_marker,fleet)
	$(BIN)/python -m pytest -n 0 -m "quiet and not ui" $(call with_marker,quiet) $(RERUN)

engines: $(READY) ## real vLLM engines on the CPU and a tiny model for them (about a minute, 7 GB)
	$(BIN)/python -m launch.cpu_engine.install --venv $(ENGINES) $(ENGINES_FLAGS)

test-engines: engines ## the proxy's tests on real engines (about 15 minutes)
	$(BIN)/python -m pytest -m engines --durations=30 --durations-min=2 tests/engines $(RERUN)

test-clients: $(READY) ## LiteLLM, LangChain, AIPerf, GuideLLM, Claude Code, Codex against the proxy (about 3 minutes, 9 GB)
	$(BIN)/python -m tests.clients.extra.environments $(CLIENTS)
	$(BIN)/python -m pytest -n 2 $(BY_FILE) -m clients_extra tests/clients/extra

browser: ## Chromium from the distribution's packages, for `make test-ui`
	@command -v chromium chromium-browser google-chrome || { command -v apt-get >/dev/null && \
	  { [ $$(id -u) = 0 ] || S=sudo; $$S apt-get update && $$S apt-get install -y --no-install-recommends chromium; }; } || \
	  { echo "install Chromium or Chrome with this system's packages, so that chromium or google-chrome is on the PATH"; exit 1; }

test-ui: $(READY) ## the dashboard in headless Chromium (`make browser` first; SCREENSHOTS=docs/images takes the pages' pictures)
	WARMROUTE_SCREENSHOTS=$(SCREENSHOTS) $(BIN)/python -m pytest -n 2 $(BY_FILE) -m ui tests/ui

collector: .collector/out/otelcol-warmroute ## OpenTelemetry collector for the tests of traces; needs Go (5 minutes on one core, 34 MB)

.collector/out/otelcol-warmroute: tests/proxy/tracing/collector/builder.yaml
	mkdir -p .collector
	GOBIN=$(CURDIR)/.collector go install go.opentelemetry.io/collector/cmd/builder@v0.160.0
	cd .collector && GOFLAGS=-buildvcs=false ./builder --config $(CURDIR)/$< --ldflags="-s -w"

helm: .helm/helm ## Helm, for the tests that render the chart; needs Go (3 minutes on two cores)

.helm/helm:
	mkdir -p .helm
	GOBIN=$(CURDIR)/.helm GOFLAGS=-buildvcs=false go install -ldflags="-s -w" helm.sh/helm/v3/cmd/helm@v3.22.0

compose-loader: .compose/cmd ## the loader of Docker Compose, for the test of the Compose files; needs Go (half a minute)

.compose/cmd:
	mkdir -p .compose
	GOBIN=$(CURDIR)/.compose GOFLAGS=-buildvcs=false go install -ldflags="-s -w" github.com/compose-spec/compose-go/v2/cmd@v2.16.2

compose-podman: ## Podman, Docker Compose and base images from Debian's packages, for `make test-compose` without a registry (3 minutes, 0.4 GB; root)
	tests/deploy/podman/build.sh .compose/podman

test-compose: $(READY) ## the replicas' Compose file in containers, on its own ports; by Podman after `make compose-podman`, else by Docker
	$(if $(wildcard .compose/podman),tests/deploy/podman/run.sh .compose/podman) $(BIN)/python -m pytest -n 0 -m compose tests/deploy

api-server: .api-server/etcd ## Kubernetes' API server and etcd, for the tests of discovery; needs Go (25 minutes on one core, 130 MB)

.api-server/etcd: tests/proxy/discovery/api_server/build.sh
	mkdir -p .api-server
	$< .api-server

monitoring-tools: ## Prometheus and promtool, for the tests of configs/monitoring (Debian and Ubuntu)
	@command -v promtool || { [ $$(id -u) = 0 ] || S=sudo; $$S apt-get update && $$S apt-get install --yes --no-install-recommends prometheus; }

RAY_READY := .venv-ray/.ready

$(RAY_READY): $(READY)
	$(PYTHON) -m venv .venv-ray
	$(call install,.venv-ray/bin/python,--require-hashes --no-deps --requirement requirements.lock)
	sed -e '/--hash=/d' -e 's/ *\\$$//' requirements.lock > .venv-ray/constraints.txt  # hashes are wanted for all or none
	$(call install,.venv-ray/bin/python,--constraint .venv-ray/constraints.txt ray==2.60.0)
	.venv-ray/bin/python -m pip install $(QUIET) --no-build-isolation --no-deps --editable .
	@touch $@

ray: $(RAY_READY) ## Ray in .venv-ray, for `make test-ray` (under a minute, 1.3 GB)

test-ray: $(RAY_READY) ## fleets on a Ray cluster of local nodes (two minutes; after `make engines` also real engines)
	.venv-ray/bin/python -m pytest -n 0 -m ray tests/launch/on_ray $(RERUN)

store: ## a Redis server, for the tests of replicas, which start their own (Debian and Ubuntu)
	@command -v redis-server valkey-server || { [ $$(id -u) = 0 ] || S=sudo; $$S apt-get update && \
	  $$S apt-get install --yes --no-install-recommends redis-server && \
	  { $$S systemctl disable --now redis-server 2>/dev/null || true; }; }

test-package: $(READY) ## build the package, install it into fresh environments, run it there (about two minutes)
	$(BIN)/python -m pytest -n 2 $(BY_FILE) -m package tests/package

audit: $(READY) ## known vulnerabilities in what requirements.lock pins
	$(BIN)/python .ci/audit.py

soak: $(READY) ## 20 minutes of kills, restarts, leaving and hostile clients at 200 streams
	$(BIN)/python -m bench.soak --minutes 20 --streams 200 --hostile --output runs/soak.json

bench-data-plane: $(READY) ## our proxy beside vLLM Router, SGLang's gateway and nginx (about half an hour)
	$(BIN)/python -m bench.data_plane.peers
	$(BIN)/python -m bench.data_plane --output runs/data_plane.json --check

tournament: $(READY) ## rank all routing policies over traces, loads, pools and fleets, into docs/tournament.md (hours)
	$(BIN)/python -m bench.tournament --jobs $$(nproc) --ablations --folds --document docs/tournament.md

analysis-docs: $(READY) ## regenerate the tables of docs/analysis.md
	$(BIN)/python -m bench.analysis.document

reference: $(READY) ## generate the pages of docs/reference and docs/clients.md from the code
	$(BIN)/python -m tests.reference
	$(BIN)/python -m tests.clients.table
	$(BIN)/python -m tests.monitoring.dashboard

docs: $(READY) ## build the documentation site into site/, without warnings (about 5 seconds)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: $(READY) ## show the documentation site on http://127.0.0.1:8123 while you write
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --dev-addr 127.0.0.1:8123

docs-version: $(READY) ## commit the site of a version to the branch gh-pages: make docs-version VERSION=0.1
	PATH="$(BIN):$$PATH" NO_MKDOCS_2_WARNING=1 $(BIN)/mike deploy --update-aliases $(VERSION) latest

docs-figures: $(READY) ## regenerate the figures of docs/images
	$(BIN)/python -m bench.docs_figures

test: $(READY) ## formatting, types, imports and the tests that need no engine and are not slow
	@$(MAKE) --no-print-directory -j4 lint types imports collected
	@$(MAKE) --no-print-directory unit

lock: $(READY) ## regenerate requirements.lock from pyproject.toml
	$(BIN)/uv pip compile pyproject.toml --extra dev --universal --python-version 3.11 --generate-hashes \
	  --no-emit-index-url --no-annotate --no-header --quiet --upgrade --output-file requirements.lock

clean: ## remove what the targets made
	rm -rf site $(VENV) $(ENGINES) .venv-clients .venv-peers .venv-ray .collector .helm .compose .api-server .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
