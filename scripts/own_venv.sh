# What test_compat.sh and test_cpu.sh have in common: run some tests with other builds of ggml and llama.cpp than .venv has.
#
# For `.` after $root (the checkout, which is the working folder), $top (a folder of the run's own) and $results are set.
# Knobs: PYTHON=python3.12, PYTEST_ARGS="-k build -x" (such a run is not written down).

venv=$top/venv
python=$venv/bin/python
CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)}
export CMAKE_BUILD_PARALLEL_LEVEL

say() { echo "rcache: $*"; }

pip() { "$python" -m pip "$@" -q --disable-pip-version-check; }

# The virtual environment with what the tests need but the packages that have a ggml in them.
make_venv() {
    mkdir -p "$top"
    [ -x "$python" ] || "${PYTHON:-python3}" -m venv "$venv"
    say "installing what the tests need into $venv"
    pip install -r requirements/run.txt -r requirements/test.txt
}

# What else is in requirements/llama.txt.
install_beside_llama() {
    sed '/^llama-cpp-python/d' requirements/llama.txt >"$top/llama.txt"
    pip install -r "$top/llama.txt"
}

# This package as a wheel that is built from a copy, and the tests in $top/run, which does not hold the package: their
# children run in the folder above the tests.
install_package() {
    say "building this package's wheel from a copy, and installing it"
    rm -rf "$top/source" "$top/wheel" "$top/run"
    mkdir -p "$top/source" "$top/run"
    cp -R rcache_plugin native pyproject.toml setup.py MANIFEST.in README.md LICENSE "$top/source"
    rm -rf "$top"/source/rcache_plugin/_rcache.c "$top"/source/rcache_plugin/_rcache*.so "$top"/source/rcache_plugin/*.o
    pip wheel --no-deps --no-build-isolation -w "$top/wheel" "$top/source"
    pip install --force-reinstall --no-deps "$top"/wheel/*.whl
    cp -R tests examples benchmarks docs scripts requirements pyproject.toml README.md Makefile "$top/run"
}

# run_tests PATH...: sets $status, $summary (pytest's last line) and $verdict.
run_tests() {
    status=0
    # shellcheck disable=SC2086
    (cd "$top/run" && "$venv/bin/pytest" ${PYTEST_ARGS:-} "$@") >"$top/pytest.log" 2>&1 || status=$?
    tail -n 25 "$top/pytest.log"
    summary=$(tail -n 1 "$top/pytest.log" | tr -d '=|' | sed 's/^ *//; s/ *$//')
    verdict=failed
    [ "$status" -ne 0 ] || verdict=passed
}

# write_down NAME COLUMN...: the row of NAME in $results, where there is one row a name, the latest run's. Takes what a
# new page begins with from its standard input. Ends the script with pytest's status.
write_down() {
    name=$1
    if [ -n "${PYTEST_ARGS:-}" ]; then
        say "$name: $verdict ($summary); not written down, as PYTEST_ARGS is set"
        exit "$status"
    fi
    [ -e "$results" ] || cat >"$results"
    grep -v "^| $name |" "$results" >"$top/results.md"
    for column; do printf '| %s ' "$column"; done >>"$top/results.md"
    echo '|' >>"$top/results.md"
    cp "$top/results.md" "$results"
    say "$name: $verdict ($summary); the log is $top/pytest.log"
    exit "$status"
}
