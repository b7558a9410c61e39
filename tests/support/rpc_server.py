"""Serves this machine's CPU by ggml's RPC on 127.0.0.1: ``python rpc_server.py PORT``.

Ends by a signal, or when its standard input ends, which it does when the test process dies.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rcache_plugin.memory.ggml import GgmlLib


def end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def main(port: int) -> None:
    lib = GgmlLib.find()
    rpc = lib._registry.ggml_backend_reg_by_name(b"RPC")
    if rpc == lib.ffi.NULL:
        sys.exit(f"the ggml at {lib.path} was built without RPC")
    address = lib._base.ggml_backend_reg_get_proc_address(rpc, b"ggml_backend_rpc_start_server")
    serve = lib.ffi.cast("void (*)(const char *, const char *, size_t, size_t, ggml_device **)", address)
    threading.Thread(target=end_with_parent, daemon=True).start()
    devices = lib.ffi.new("ggml_device *[]", [lib.device("CPU").handle])
    serve(f"127.0.0.1:{port}".encode(), lib.ffi.NULL, 1, 1, devices)
    sys.exit(f"cannot serve on port {port}")  # serving ends only when it could not begin


if __name__ == "__main__":
    main(int(sys.argv[1]))
