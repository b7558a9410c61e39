"""``rcache run``: text from a Mamba on this cache."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from ..exits import EXIT_INTERRUPTED


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser("run", help="generate text with a Mamba GGUF", description=_run.__doc__)
    parser.set_defaults(command=_run)
    parser.add_argument("-m", "--model", type=Path, metavar="FILE", help="GGUF file (default: the bundled model)")
    parser.add_argument("-p", "--prompt", required=True, metavar="TEXT", help="text to continue; - reads stdin")
    parser.add_argument("-n", "--n-predict", type=_int(0), default=128, metavar="N", help="tokens to generate (128)")
    parser.add_argument("--seqs", type=_int(1), default=1, metavar="K", help="continue the prompt in K sequences (1)")
    parser.add_argument("--temp", type=_temperature, default=0.8, metavar="T", help="temperature; 0 is greedy (0.8)")
    parser.add_argument("--seed", type=_int(0), default=0, metavar="S", help="of sequence 0; sequence i has S + i (0)")
    parser.add_argument("--cells", action="store_true", help="show the cell table after each step")
    parser.add_argument("--threads", type=_int(1), metavar="N", help="CPU threads (default: all cores)")
    parser.add_argument("--ubatch", type=_int(1), default=512, metavar="N", help="most tokens in one graph (512)")
    parser.add_argument("--placement", choices=("classic", "compact"), default="classic", help="of cells (classic)")


def _int(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}")
        return value

    number.__name__ = "number"  # argparse names it when the text is none
    return number


def _temperature(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError("must be 0 or more")
    return value


def _run(args: argparse.Namespace) -> int:
    """Continue a text with a Mamba GGUF, in one sequence or in several that share the prompt's state."""
    from ...hosts.mamba import bundled_model
    from .session import Session
    from .terminal import Bars, Stop

    text = sys.stdin.read().removesuffix("\n") if args.prompt == "-" else args.prompt
    if args.seqs > 1 and args.temp == 0:
        print("rcache: with --temp 0 all sequences are the same", file=sys.stderr)
    with Stop().installed() as stop, ExitStack() as owned:
        with ExitStack() as shown:
            bars = Bars(shown)
            session = Session.open(args, args.model or bundled_model(), text, bars, stop, owned)
            session.prefill(bars)
        session.generate(args.n_predict)
        session.report()
        return EXIT_INTERRUPTED if stop.asked else 0
