"""``rcache devices``: the devices of a ggml."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser("devices", help="list ggml's devices", description=_devices.__doc__)
    parser.set_defaults(command=_devices)
    parser.add_argument("--ggml", type=Path, metavar="PATH", help="ggml library, or the folder it is in")
    parser.add_argument("--rpc", action="append", default=[], metavar="HOST:PORT", help="add an RPC server's device")
    parser.add_argument("--json", action="store_true", help="print a JSON list")


def _devices(args: argparse.Namespace) -> int:
    """List the devices of a ggml build: name, kind, description, free and total memory."""
    from ..memory.ggml import GgmlLib

    lib = GgmlLib.find(args.ggml)
    for endpoint in args.rpc:
        lib.add_rpc_server(endpoint)
    found = lib.devices()
    if args.json:
        names = ("name", "kind", "description", "memory_free", "memory_total")
        print(json.dumps([{name: getattr(device, name) for name in names} for device in found], indent=2))
        return 0
    print(f"ggml: {lib.path}", file=sys.stderr)
    rows = [("NAME", "KIND", "DESCRIPTION", "FREE", "TOTAL")]
    rows += [(d.name, d.kind, d.description, _mib(d.memory_free), _mib(d.memory_total)) for d in found]
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    for row in rows:
        left = "  ".join(f"{row[i]:<{widths[i]}}" for i in range(3))
        print(f"{left}  {row[3]:>{widths[3]}}  {row[4]:>{widths[4]}}")
    return 0


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:.0f} MiB"
