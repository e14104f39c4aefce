# Two commands, each complete on a fresh machine with Python 3.11 or newer: `make audit` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
MAKEFLAGS += --no-print-directory
# -n 2: the suite is split over two worker processes.
PYTEST_ARGS ?= -n 2

# The C++ core is checked with each compiler that is here. JOBS: files compiled at once.
COMPILERS := $(if $(filter default,$(origin CXX)),$(foreach name,g++ clang++,$(if $(shell command -v $(name)),$(name))),$(CXX))
CMAKE     := $(or $(shell command -v cmake),$(BIN)/cmake)
JOBS      ?= 2

.PHONY: audit readme test lint types contracts tests warnings sanitize clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(BIN)/cmake: $(BIN)/python
	$(BIN)/python -m pip install -q cmake

NATIVE := CMakeLists.txt $(wildcard native/*.*)

$(VENV)/.installed: $(BIN)/python pyproject.toml constraints.txt $(NATIVE)
	$(BIN)/python -m pip install -q -c constraints.txt -e .
	touch $@

$(VENV)/.installed-test: $(BIN)/python pyproject.toml constraints.txt $(NATIVE)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[test]'
	touch $@ $(VENV)/.installed

audit: $(VENV)/.installed
	$(BIN)/rooftile audit llama-3.1-8b --device h100-sxm

test: lint types contracts warnings sanitize tests

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-test
	$(BIN)/mypy

contracts: $(VENV)/.installed-test
	$(BIN)/lint-imports

tests: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# $(call core,folder,compiler,options of CMake,targets): builds the core's own tests. Threads that wait need no processor.
define core
	$(CMAKE) -S . -B build/$(1) -DCMAKE_CXX_COMPILER=$(2) -DROOFTILE_TESTS=ON $(3) >/dev/null
	$(CMAKE) --build build/$(1) --parallel $(JOBS) $(4)
endef
core_tests = OMP_WAIT_POLICY=passive build/$(1)/native/tests/rooftile_attention_test

ifeq ($(strip $(COMPILERS)),)
warnings sanitize:
	@echo "$@: there is no C++ compiler here (g++ or clang++), so the native core is not checked"
else
# The core as it ships, where a warning is an error; its tests end at pages that nobody may touch.
warnings: $(COMPILERS:%=warnings-%)
$(COMPILERS:%=warnings-%): warnings-%: $(CMAKE)
	$(call core,warnings-$(notdir $*),$*,-DCMAKE_CXX_FLAGS=-Werror)
	$(call core_tests,warnings-$(notdir $*))

# The same tests under AddressSanitizer and UndefinedBehaviorSanitizer, then under ThreadSanitizer. ThreadSanitizer of older
# compilers can't map its memory where addresses are random in 32 bits, so it goes without where that is allowed.
sanitize: sanitize-address sanitize-thread
sanitize-address sanitize-thread: sanitize-%: $(CMAKE)
	$(call core,sanitize-$*,$(firstword $(COMPILERS)),-DROOFTILE_SANITIZE=$*,--target rooftile_attention_test)
	$$(setarch -R true 2>/dev/null && echo setarch -R) env $(call core_tests,sanitize-$*)
.PHONY: $(COMPILERS:%=warnings-%) sanitize-address sanitize-thread
endif

readme: $(VENV)/.installed-test
	$(BIN)/python tests/test_readme.py

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
