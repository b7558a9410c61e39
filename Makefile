# make demo | test | bench | lint need python3 (3.10 or later), a C and C++ compiler and make; the rest comes by pip into .venv.
# Other knobs: PYTHON=python3.12, PYTEST_ARGS="-k cells -x", CMAKE_ARGS=-DGGML_CUDA=ON (for the ggml build).

PYTHON      ?= python3
PYTEST_ARGS ?=
DEMO_PROMPT ?= In the beginning
EXAMPLES    ?= 50000
ORACLE_EXAMPLES ?= 20000
STATE_EXAMPLES ?= 200000
CONVERSATIONS ?= 5000
VERSION     ?= 0.3.34
CPU         ?= baseline

VENV   := .venv
PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip install -q --disable-pip-version-check
STAMPS := $(VENV)/.stamps
NATIVE := $(wildcard native/*.py native/*.c native/*.h rcache_plugin/capi/include/*.h) pyproject.toml setup.py
BUILT  := rcache_plugin/_rcache*.so rcache_plugin/_rcache.c rcache_plugin/_rcache.o
SAY    := @printf 'rcache: %s\n'

export CMAKE_BUILD_PARALLEL_LEVEL ?= $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)

# ggml's threads spin while they wait, which takes a busy machine's cores from those that have work.
export OMP_WAIT_POLICY ?= passive

.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test test-fuzz test-fuzz-state test-oracle test-conversations test-archs test-compat test-cpu asan
.PHONY: bench lint native clean distclean

help:
	@echo 'make demo       generate text with the bundled model'
	@echo 'make test       all tests            (PYTEST_ARGS="-k cells")'
	@echo 'make test-fuzz  the cell table against its naive model, $(EXAMPLES) examples, and checkpoints, a tenth'
	@echo 'make test-fuzz-state  damaged states, $(STATE_EXAMPLES) in Python and as many through C (STATE_EXAMPLES=...)'
	@echo 'make test-oracle  the cell table against the class of llama.cpp, $(ORACLE_EXAMPLES) sequences of operations'
	@echo 'make test-conversations  $(CONVERSATIONS) random conversations in llama-cpp-python, each text as a fresh run gives it'
	@echo 'make test-archs   parity with stock on every recurrent architecture'
	@echo 'make test-compat  the host tests with another llama-cpp-python (VERSION=0.3.34)'
	@echo 'make test-cpu     the host tests with ggml built for another instruction set (CPU=baseline|avx2|avx512|native)'
	@echo 'make asan       the C test program under AddressSanitizer'
	@echo 'make bench      the benchmarks'
	@echo 'make lint       ruff and mypy --strict'
	@echo 'make native     the compiled parts only: the C interface, and the adapter for llama.cpp'
	@echo 'make clean      remove what was built; make distclean: .venv too'

demo: $(STAMPS)/package $(STAMPS)/ggml
	$(SAY) 'generating text with the bundled model: rcache run -p "$(DEMO_PROMPT)"'
	@$(PY) -m rcache_plugin run -p "$(DEMO_PROMPT)" -n 96 --temp 0.7 --seed 3

test: $(STAMPS)/package $(STAMPS)/ggml $(STAMPS)/llama $(STAMPS)/test
	$(SAY) 'running the tests: a few minutes on two cores'
	@$(PY) -m pytest $(PYTEST_ARGS)

test-fuzz: $(STAMPS)/package $(STAMPS)/test
	$(SAY) 'running the state machine of the cell table for $(EXAMPLES) examples: about an hour on one core'
	@RCACHE_EXAMPLES=$(EXAMPLES) RCACHE_CHECKPOINT_EXAMPLES=$$(($(EXAMPLES) / 10)) $(PY) -m pytest --timeout=0 \
		-o faulthandler_timeout=0 tests/cells/test_slots_stress.py tests/checkpoints/test_checkpoints.py $(PYTEST_ARGS)

test-fuzz-state: $(STAMPS)/package $(STAMPS)/ggml $(STAMPS)/test
	$(SAY) 'restoring $(STATE_EXAMPLES) damaged states in Python and as many through C: 10 minutes to half an hour on one core'
	@RCACHE_STATE_EXAMPLES=$(STATE_EXAMPLES) $(PY) -m pytest --timeout=0 -o faulthandler_timeout=0 tests/states/test_state_fuzz.py $(PYTEST_ARGS)

test-oracle: $(STAMPS)/package $(STAMPS)/llama $(STAMPS)/test
	$(SAY) 'running $(ORACLE_EXAMPLES) sequences of operations on the cell table and on the class of llama.cpp: about half an hour'
	@RCACHE_ORACLE_EXAMPLES=$(ORACLE_EXAMPLES) $(PY) -m pytest --timeout=0 -o faulthandler_timeout=0 tests/hosts/llama/test_llama_oracle.py

test-conversations: $(STAMPS)/package $(STAMPS)/llama $(STAMPS)/test
	$(SAY) 'running $(CONVERSATIONS) random conversations in llama-cpp-python: about 15 minutes'
	@RCACHE_CONVERSATIONS=$(CONVERSATIONS) $(PY) -m pytest --timeout=0 -o faulthandler_timeout=0 tests/hosts/llama/test_llama_conversations.py $(PYTEST_ARGS)

test-archs: $(STAMPS)/package $(STAMPS)/llama $(STAMPS)/test
	$(SAY) 'comparing with stock on a tiny model of every recurrent architecture: builds their generator first, about 10 minutes'
	@$(PY) scripts/archs.py

test-compat: $(STAMPS)/package
	$(SAY) 'running the tests of the llama.cpp host with llama-cpp-python $(VERSION): builds it first, 6 to 12 minutes'
	@sh scripts/test_compat.sh "$(VERSION)"

test-cpu:
	@$(PYTHON) scripts/check_machine.py
	@PYTHON="$(PYTHON)" sh scripts/test_cpu.sh "$(CPU)"

asan: $(STAMPS)/package $(STAMPS)/ggml
	$(SAY) 'running the C test program under AddressSanitizer (and valgrind, if there is one): a few minutes'
	@sh tests/native/run_asan.sh "$(abspath $(PY))"

bench: $(STAMPS)/package $(STAMPS)/ggml $(STAMPS)/llama $(STAMPS)/test
	$(SAY) 'running the benchmarks: about half an hour; leave the machine alone meanwhile'
	@mkdir -p build/bench
	@$(PY) benchmarks/bench_cells.py --json build/bench/cells.json
	@$(PY) benchmarks/bench_llama.py --json build/bench/llama.json
	@$(PY) benchmarks/bench_state.py --json build/bench/state.json
	@$(PY) benchmarks/bench_reuse.py --json build/bench/reuse.json

lint: $(STAMPS)/run $(STAMPS)/lint
	$(SAY) 'checking with ruff and mypy --strict'
	@$(PY) -m ruff check .
	@$(PY) -m mypy --strict rcache_plugin

native: $(STAMPS)/package $(STAMPS)/llama
	$(SAY) 'compiling the adapter for the llama-cpp-python in .venv: some 10 seconds'
	@$(PY) -m rcache_plugin build-llama

clean:
	rm -rf build dist *.egg-info $(BUILT) .pytest_cache .mypy_cache .ruff_cache .hypothesis $(STAMPS)/package
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)

# Each stamp says that its step is done with the pins and sources of then.

$(STAMPS)/venv:
	$(SAY) 'creating .venv; the first build takes 3 to 4 minutes for the demo and 15 to 20 for the tests (they build llama.cpp), later ones seconds'
	@$(PYTHON) scripts/check_machine.py
	@$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/run: requirements/run.txt | $(STAMPS)/venv
	$(SAY) 'installing what the package runs with: under a minute'
	@$(PIP) -r $<
	@touch $@

$(STAMPS)/package: $(NATIVE) $(STAMPS)/run
	$(SAY) 'compiling the C part and installing this folder into .venv: some 10 seconds'
	@rm -f $(BUILT)
	@$(PIP) --no-build-isolation --no-deps -e .
	@touch $@

$(STAMPS)/ggml: requirements/ggml.txt scripts/ggml_wheel.py $(STAMPS)/run
	$(SAY) 'installing ggml-python with its RPC backend: about 2 minutes on two cores when it has to be built'
	@wheel=$$($(PY) scripts/ggml_wheel.py requirements/ggml.txt) && $(PIP) --force-reinstall --no-deps "$$wheel" && $(PIP) "$$wheel"
	@touch $@

$(STAMPS)/llama: requirements/llama.txt $(STAMPS)/run $(STAMPS)/ggml
	$(SAY) 'installing stock llama-cpp-python, which tests compare with: 6 to 12 minutes on two cores when it has to be built'
	@$(PIP) -r $<
	@touch $@

$(STAMPS)/test: requirements/test.txt $(STAMPS)/run
	$(SAY) 'installing the test tools: under a minute'
	@$(PIP) -r $<
	@touch $@

$(STAMPS)/lint: requirements/lint.txt $(STAMPS)/run
	$(SAY) 'installing ruff and mypy: under a minute'
	@$(PIP) -r $<
	@touch $@
