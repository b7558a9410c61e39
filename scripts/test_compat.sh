#!/bin/sh
# Runs the tests of the llama.cpp host with another version of llama-cpp-python: sh scripts/test_compat.sh 0.3.34
#
# Builds that version in a virtual environment of its own, build/compat-VERSION (6 to 12 minutes on two cores the first
# time), installs this package there as a wheel, and runs tests/hosts/llama away from the checkout, so that nothing
# but the wheel is tested. Writes one line for the version into docs/compat-results.md and ends with pytest's exit status.
# Knobs: those of own_venv.sh, and CMAKE_ARGS for llama.cpp.
set -eu

version=${1:?usage: sh scripts/test_compat.sh VERSION}
case $version in *[!0-9.]*) echo "rcache: $version is no version" >&2; exit 2;; esac
cd "$(dirname "$0")/.."
root=$PWD
top=$root/build/compat-$version
results=docs/compat-results.md
. scripts/own_venv.sh

make_venv
wheel=$("$python" scripts/ggml_wheel.py requirements/ggml.txt)
pip install "$wheel"
say "installing llama-cpp-python $version: 6 to 12 minutes on two cores when it has to be built"
pip install "llama-cpp-python==$version"
install_beside_llama
install_package

say "running the tests of the llama.cpp host with llama-cpp-python $version"
run_tests tests/hosts/llama
machine="$(uname -m), $("${CXX:-c++}" --version | head -n 1 | tr -d '|'), Python $("$python" -c 'import platform; print(platform.python_version())')"
write_down "$version" "$(date -u +%Y-%m-%d)" "$verdict" "$summary" "$machine" <<'PAGE'
# Other versions of llama-cpp-python

Written by `make test-compat VERSION=...`: the tests of the llama.cpp host, run with that version.

| llama-cpp-python | date | result | pytest | machine |
|---|---|---|---|---|
PAGE
