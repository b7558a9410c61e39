#!/bin/sh
# Runs the tests of the hosts with a ggml for another instruction set: sh scripts/test_cpu.sh baseline|avx2|avx512|native
#
# Builds llama-cpp-python and ggml-python for that set (10 to 20 minutes on two cores the first time; the wheels are kept
# by scripts/ggml_wheel.py, apart from those of other sets and from pip's), installs them and this package in a virtual
# environment of its own, build/cpu-SET, asks both copies of ggml whether they are what was asked, and runs tests/hosts,
# tests/memory and tests/states away from the checkout. Writes one line for the set into docs/cpu-results.md and ends with
# pytest's exit status, or with 2, before anything is built, when the processor lacks what the set needs.
# Knobs: those of own_venv.sh, CMAKE_ARGS for both builds (the set's switches come after it), CPUINFO=file for tests.
set -eu

cpu=${1:?usage: sh scripts/test_cpu.sh baseline|avx2|avx512|native}
cd "$(dirname "$0")/.."
root=$PWD
top=$root/build/cpu-$cpu
results=docs/cpu-results.md
cpuinfo=${CPUINFO:-/proc/cpuinfo}
flags=$("${PYTHON:-python3}" scripts/cpu_sets.py flags "$cpu" --cpuinfo "$cpuinfo")
CMAKE_ARGS="${CMAKE_ARGS:+$CMAKE_ARGS }$flags"
export CMAKE_ARGS
. scripts/own_venv.sh

# install_built PINS NAME
install_built() {
    wheel=$("$python" scripts/ggml_wheel.py "$1" --package "$2" --group "cpu-$cpu")
    pip install --force-reinstall --no-deps "$wheel"
    pip install "$wheel"
}

say "CPU=$cpu: CMAKE_ARGS=$CMAKE_ARGS"
make_venv
say "installing ggml-python for CPU=$cpu: 2 to 4 minutes on two cores when it has to be built"
install_built requirements/ggml.txt ggml-python
say "installing llama-cpp-python for CPU=$cpu: 6 to 15 minutes on two cores when it has to be built"
install_built requirements/llama.txt llama-cpp-python
install_beside_llama
install_package
(cd "$top/run" && "$python" scripts/cpu_sets.py check "$cpu" --cpuinfo "$cpuinfo")

say "running the tests of the hosts, the buffers and the states with CPU=$cpu"
run_tests tests/hosts tests/memory tests/states
write_down "$cpu" "$(date -u +%Y-%m-%d)" "$verdict" "$summary" "$("$python" scripts/cpu_sets.py machine | tr -d '|')" <<'PAGE'
# Other instruction sets

Written by `make test-cpu CPU=baseline|avx2|avx512|native`: the tests of the hosts, the buffers and the states, run with
a llama-cpp-python and a ggml-python that are built for that set. Both copies of ggml are asked what they use before the
tests run, and a build that differs from its set is refused.

| set | what ggml uses on x86-64 |
|---|---|
| `baseline` | what every x86-64 processor has: no SSE3, no AVX |
| `avx2` | SSE4.2, AVX, AVX2, F16C, FMA, BMI2 |
| `avx512` | that and AVX-512 F, CD, VL, DQ and BW; VBMI, VNNI and BF16 where the processor has them |
| `native` | all that the processor has and the compiler knows, AMX too: how pip builds them |

On aarch64 there are `baseline` and `native`. A set that the processor lacks is refused before anything is built.

| CPU | date | result | pytest | processor |
|---|---|---|---|---|
PAGE
