#!/bin/sh
# Runs the C scenario and the compiled part of the package under AddressSanitizer and UndefinedBehaviorSanitizer, then
# the scenario once more under valgrind if that is installed. Usage: run_asan.sh PYTHON
# Blocks that the interpreter leaves behind are not ours: only those allocated by this package count as leaks.
set -eu
python=${1:-python3}
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
flags="-std=gnu11 -Wall -Wextra -g -O1 -fPIC -fno-omit-frame-pointer"
sanitize="-fsanitize=address,undefined -fno-sanitize-recover=undefined"
include="-I$root/rcache_plugin/capi/include -I$root/native"

# a copy of the package whose extension module is instrumented
cp -r "$root/rcache_plugin" "$work/rcache_plugin"
rm -f "$work"/rcache_plugin/_rcache*.so
cp -r "$root/native" "$work/native"
(cd "$work" && CFLAGS="$sanitize -g -O1" LDFLAGS="$sanitize" "$python" native/build_ffi.py > build.log 2>&1) || {
    cat "$work/build.log"; exit 1; }
# shellcheck disable=SC2086
cc $flags $sanitize -shared $include "$root/tests/native/abi_scenario.c" -o "$work/abi_scenario.so" -lm -lpthread

echo "AddressSanitizer and UndefinedBehaviorSanitizer:"
LD_PRELOAD="$(cc -print-file-name=libasan.so) $(cc -print-file-name=libubsan.so)" \
ASAN_OPTIONS=detect_leaks=0:abort_on_error=1:detect_stack_use_after_return=1 PYTHONMALLOC=malloc PYTHONPATH="$work" \
    "$python" "$root/tests/native/run_scenario.py" "$work/abi_scenario.so"

if "$python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("llama_cpp") is None)'; then
    echo "AddressSanitizer, the llama.cpp adapter:"
    PYTHONPATH="$root" "$python" "$root/tests/native/build_llama_asan.py" "$work" -fsanitize=address
    LD_PRELOAD="$(cc -print-file-name=libasan.so) $(cc -print-file-name=libstdc++.so.6)" \
    ASAN_OPTIONS=detect_leaks=0:abort_on_error=1:detect_odr_violation=0 PYTHONMALLOC=malloc PYTHONPATH="$work" \
        "$python" "$root/tests/native/run_llama.py" "$work/adapter.so" "$work/mamba.gguf" "$work/granite-hybrid.gguf" \
        "$work/qwen35.gguf"
fi

if command -v valgrind > /dev/null; then
    echo "valgrind (memcheck; leaks of this package only):"
    mkdir "$work/plain"
    cp -r "$root/rcache_plugin" "$root/native" "$work/plain/"
    rm -f "$work"/plain/rcache_plugin/_rcache*.so
    (cd "$work/plain" && CFLAGS="-g -O1" "$python" native/build_ffi.py > build.log 2>&1)
    # shellcheck disable=SC2086
    cc $flags -shared $include "$root/tests/native/abi_scenario.c" -o "$work/plain/abi_scenario.so" -lm -lpthread
    PYTHONMALLOC=malloc PYTHONPATH="$work/plain" valgrind -q --leak-check=full --show-leak-kinds=definite,indirect \
        --num-callers=30 --log-file="$work/valgrind.log" \
        "$python" "$root/tests/native/run_scenario.py" "$work/plain/abi_scenario.so" --short
    "$python" "$root/tests/native/valgrind_findings.py" "$work/valgrind.log"
fi
