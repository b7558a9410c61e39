"""Proves that ``rcache devices`` lists what ggml has registered, an RPC server's device too."""

from __future__ import annotations

import json
from pathlib import Path

from children import rcache
from ggml_kit import Server


def test_devices() -> None:
    table = rcache("devices").stdout.splitlines()
    assert table[0].split() == ["NAME", "KIND", "DESCRIPTION", "FREE", "TOTAL"]
    found = json.loads(rcache("devices", "--json").stdout)
    assert [line.split()[0] for line in table[1:]] == [device["name"] for device in found]
    (cpu,) = [device for device in found if device["kind"] == "CPU"]
    assert cpu["name"] == "CPU"
    assert 0 < cpu["memory_free"] <= cpu["memory_total"]


def test_devices_of_an_rpc_server() -> None:
    server = Server()
    try:
        (added,) = json.loads(rcache("devices", "--json", "--rpc", server.endpoint).stdout)[1:]
    finally:
        server.end()
    assert added["name"].startswith("RPC")
    assert server.endpoint in added["description"]


def test_devices_of_a_folder_without_ggml(tmp_path: Path) -> None:
    done = rcache("devices", "--ggml", str(tmp_path), expect=2)
    assert len(done.stderr.splitlines()) == 1
    assert str(tmp_path) in done.stderr
