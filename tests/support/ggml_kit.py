"""The ggml-python that is installed, seen from outside: its folder, code in a child process, an RPC server."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from children import ROOT

from rcache_plugin.memory import libraries
from rcache_plugin.memory.rpc import rpc_connectable

SERVER = Path(__file__).with_name("rpc_server.py")


def ggml_folder() -> Path:
    spec = importlib.util.find_spec("ggml")
    assert spec is not None and spec.submodule_search_locations, "the tests need ggml-python"
    return Path(next(iter(spec.submodule_search_locations))).resolve() / "lib"


def child(code: str, *arguments: object, **environment: str) -> str:
    """Runs code in a process of its own, since what is mapped stays mapped; returns what it prints."""
    env = {name: value for name, value in os.environ.items() if name != libraries.ENV_VAR}
    env["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        env=env | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


class Server:
    """A server process, ready to be connected to."""

    def __init__(self) -> None:
        if not any(ggml_folder().glob("*ggml-rpc.*")):
            pytest.fail(
                f"no libggml-rpc in {ggml_folder()}: ggml-python was built without RPC. Build it with "
                "CMAKE_ARGS=-DGGML_RPC=ON and a pip cache of its own, as `make test` does",
                pytrace=False,
            )
        for _ in range(5):  # someone else may take the port between the two
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            self.endpoint = f"127.0.0.1:{port}"
            self.process = subprocess.Popen(
                [sys.executable, str(SERVER), str(port)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            if self._wait():
                return
        pytest.fail(f"the RPC server did not start: {self.end()[1]}", pytrace=False)

    def _wait(self) -> bool:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and self.process.poll() is None:
            if rpc_connectable(self.endpoint):
                return True
            time.sleep(0.05)
        return False

    def end(self) -> tuple[int, str]:
        """Terminates the process, by its id; its exit status and what it had to say."""
        if self.process.poll() is None:
            self.process.terminate()
        _, said = self.process.communicate(timeout=10)
        return self.process.returncode, said
