"""``rcache include-dir``: where the C header is."""

from __future__ import annotations

import argparse


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser("include-dir", help="print the folder of the C header", description=_include.__doc__)
    parser.set_defaults(command=_include)


def _include(args: argparse.Namespace) -> int:
    """Print the folder that holds rcache_plugin.h, for a C compiler's -I."""
    from ..capi import INCLUDE

    print(INCLUDE)
    return 0
