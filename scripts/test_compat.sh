#!/bin/sh
# Runs the tests of the llama.cpp host with another version of llama-cpp-python: sh scripts/test_compat.sh 0.3.34
#
# Builds that version in a virtual environment of its own, build/compat-VERSION (6 to 12 minutes on two cores the first
# time), installs this package there as a wheel, and runs tests/hosts/llama away from the checkout, so that nothing
# but the wheel is tested. Writes one line for the version into docs/compat-results.md and ends with pytest's exit status.
# Knobs: PYTHON=python3.12, CMAKE_ARGS for llama.cpp, PYTEST_ARGS="-k build -x" (such a run is not written down).
set -eu

version=${1:?usage: sh scripts/test_compat.sh VERSION}
case $version in *[!0-9.]*) echo "rcache: $version is no version" >&2; exit 2;; esac
cd "$(dirname "$0")/.."
root=$PWD
top=$root/build/compat-$version
venv=$top/venv
results=docs/compat-results.md
CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)}
export CMAKE_BUILD_PARALLEL_LEVEL

say() { echo "rcache: $*"; }

mkdir -p "$top"
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
python=$venv/bin/python
pip() { "$python" -m pip "$@" -q --disable-pip-version-check; }

say "installing what the tests need into $venv"
pip install -r requirements/run.txt -r requirements/test.txt
wheel=$("$python" scripts/ggml_wheel.py requirements/ggml.txt)
pip install "$wheel"
say "installing llama-cpp-python $version: 6 to 12 minutes on two cores when it has to be built"
pip install "llama-cpp-python==$version"
sed '/^llama-cpp-python/d' requirements/llama.txt >"$top/llama.txt"
pip install -r "$top/llama.txt"

say "building this package's wheel from a copy, and installing it"
rm -rf "$top/source" "$top/wheel" "$top/run"
mkdir -p "$top/source" "$top/run"
cp -R rcache_plugin native pyproject.toml setup.py MANIFEST.in README.md LICENSE "$top/source"
rm -rf "$top"/source/rcache_plugin/_rcache.c "$top"/source/rcache_plugin/_rcache*.so "$top"/source/rcache_plugin/*.o
pip wheel --no-deps --no-build-isolation -w "$top/wheel" "$top/source"
pip install --force-reinstall --no-deps "$top"/wheel/*.whl

# The tests' children run in the folder above the tests: it must not hold the package.
cp -R tests examples benchmarks docs scripts requirements pyproject.toml README.md Makefile "$top/run"
say "running the tests of the llama.cpp host with llama-cpp-python $version"
status=0
# shellcheck disable=SC2086
(cd "$top/run" && "$venv/bin/pytest" ${PYTEST_ARGS:-} tests/hosts/llama) >"$top/pytest.log" 2>&1 || status=$?
tail -n 25 "$top/pytest.log"

summary=$(tail -n 1 "$top/pytest.log" | tr -d '=|' | sed 's/^ *//; s/ *$//')
verdict=failed
[ "$status" -eq 0 ] && verdict=passed
if [ -n "${PYTEST_ARGS:-}" ]; then
    say "llama-cpp-python $version: $verdict ($summary); not written down, as PYTEST_ARGS is set"
    exit "$status"
fi
machine="$(uname -m), $("${CXX:-c++}" --version | head -n 1 | tr -d '|'), Python $("$python" -c 'import platform; print(platform.python_version())')"
if [ ! -e "$results" ]; then
    printf '# Other versions of llama-cpp-python\n\n' >"$results"
    printf 'Written by `make test-compat VERSION=...`: the tests of the llama.cpp host, run with that version.\n\n' >>"$results"
    printf '| llama-cpp-python | date | result | pytest | machine |\n|---|---|---|---|---|\n' >>"$results"
fi
# One line a version: the latest run's.
grep -v "^| $version |" "$results" >"$top/results.md"
printf '| %s | %s | %s | %s | %s |\n' "$version" "$(date -u +%Y-%m-%d)" "$verdict" "$summary" "$machine" >>"$top/results.md"
cp "$top/results.md" "$results"
say "llama-cpp-python $version: $verdict ($summary); the log is $top/pytest.log"
exit "$status"
