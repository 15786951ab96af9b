# Everything from a bare machine: Python, make and a C++ compiler (for llama.cpp) are all it takes.
#
#   make demo    the embedded pair, as it is and at the cost of a 1B model, plainly and speculatively
#   make test    lint, types and tests
#   make bench   the measurements behind the figures in the documentation

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# With a constraints file a torch build can be pinned; see constraints.txt.
INSTALL := $(PIP) install --quiet --constraint constraints.txt
# Some GCCs (12.2 is one; their header is the sign) configure AMX tiles from memory that they did not write:
# llama.cpp compiled by them for a processor that has AMX crashes in its first wide pass, so it does without there.
BROKEN_AMX := $(shell $(CXX) -E -include immintrin.h -x c++ /dev/null 2>&1 | grep 'ldtilecfg.*const void \*\*')
ifneq ($(BROKEN_AMX),)
export CMAKE_ARGS += -DCMAKE_C_FLAGS=-mno-amx-int8 -DCMAKE_CXX_FLAGS=-mno-amx-int8
endif

# Text the pair was not trained on; see `paceline run --help`.
SAMPLE := logs:6
# Sampled: greedily so small a model repeats itself, which flatters drafting.
SAMPLING := --temp 0.8 --seed 1

.PHONY: demo test lint types unit bench train clean

demo: $(VENV)/.installed
	$(BIN)/paceline run --sample $(SAMPLE) $(SAMPLING) -n 200
	$(BIN)/paceline run --sample $(SAMPLE) $(SAMPLING) -n 200 --compare
	$(BIN)/paceline inflate 1b --type Q4_0
	$(BIN)/paceline run -m target-1b-q4_0 -md draft --sample $(SAMPLE) $(SAMPLING) -n 200 --compare

test: lint types unit

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/.installed-dev
	$(BIN)/mypy

unit: $(VENV)/.installed-dev
	$(BIN)/python -m pytest

bench: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks

train: $(VENV)/.installed-dev
	$(BIN)/python -m training all

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing paceline; llama.cpp is compiled the first time, which takes a few minutes"
	$(INSTALL) --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(INSTALL) --editable '.[torch,plots,dev]'
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
