"""The command line: text from a Mamba on this cache, its cells, ggml's devices, programs run on the cache.

The extra ``mamba`` brings what it needs beyond the core; each command imports that when it runs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import runpy
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import __version__
from ..cells.batch import Batch
from ..cells.ubatch import CELL_NONE, POS_NONE, Float32Array
from ..errors import InvalidArgument, RcacheError
from ..hosts.mamba.sampling import sample

if TYPE_CHECKING:
    from ..capi.client import TableClient
    from ..cells.table import CellTable
    from ..hosts.mamba import MambaContext, MambaModel
    from ..hosts.mamba.tokenizer import StreamDecoder
    from ..states.inspect import Report

EXIT_ERROR = 2
"""Exit code of an error that was reported in one line; argparse uses the same."""
EXIT_NOT_INTACT = 1
EXIT_INTERRUPTED = 130
EXIT_PIPE_CLOSED = 141

_EXTRA_MODULES = ("ggml", "gguf", "rich", "tokenizers")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (default: the process's own arguments) and returns its exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    program: list[str] = []
    if words[:1] == ["exec"] and words[1:] and words[1] not in ("-h", "--help"):
        words, program = words[:1], words[1:]  # all that follows is the program's own
    args = _parser().parse_args(words)
    if words[:1] == ["exec"] and program in ([], ["-m"]):
        args.parser.error("a script, or -m MODULE, is missing")
    args.program = program
    code = _reported(args)
    if program and code == 0:
        _run_program(program)  # outside _reported: its exceptions are its own
    return code


def _reported(args: argparse.Namespace) -> int:
    """Runs the command; what the user can mend is reported in one line."""
    try:
        code: int = args.command(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Python flushes stdout once more when it ends, and would complain then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE_CLOSED
    except ModuleNotFoundError as e:
        if e.name is None or e.name.partition(".")[0] not in _EXTRA_MODULES:
            raise
        return _fail(f"{e.name} is not installed; the extra has it: pip install 'rcache-plugin[mamba]'")
    except (RcacheError, OSError) as e:
        return _fail(str(e))


def _fail(message: str) -> int:
    print(f"rcache: error: {'; '.join(message.splitlines())}", file=sys.stderr)
    return EXIT_ERROR


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rcache", description="Recurrent-state cache for llama.cpp hosts.")
    parser.add_argument("--version", action="version", version=f"rcache {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    run = commands.add_parser("run", help="generate text with a Mamba GGUF", description=_run.__doc__)
    run.set_defaults(command=_run)
    run.add_argument("-m", "--model", type=Path, metavar="FILE", help="GGUF file (default: the bundled model)")
    run.add_argument("-p", "--prompt", required=True, metavar="TEXT", help="text to go on with; - reads stdin")
    run.add_argument("-n", "--n-predict", type=_int(0), default=128, metavar="N", help="tokens to generate (128)")
    run.add_argument("--seqs", type=_int(1), default=1, metavar="K", help="continue the prompt in K sequences (1)")
    run.add_argument("--temp", type=_temperature, default=0.8, metavar="T", help="temperature; 0 is greedy (0.8)")
    run.add_argument("--seed", type=_int(0), default=0, metavar="S", help="of sequence 0; sequence i has S + i (0)")
    run.add_argument("--cells", action="store_true", help="show the cell table after each step")
    run.add_argument("--threads", type=_int(1), metavar="N", help="CPU threads (default: all cores)")
    run.add_argument("--ubatch", type=_int(1), default=512, metavar="N", help="most tokens in one graph (512)")
    run.add_argument("--placement", choices=("classic", "compact"), default="classic", help="of cells (classic)")

    devices = commands.add_parser("devices", help="list ggml's devices", description=_devices.__doc__)
    devices.set_defaults(command=_devices)
    devices.add_argument("--ggml", type=Path, metavar="PATH", help="ggml library, or the folder it is in")
    devices.add_argument("--rpc", action="append", default=[], metavar="HOST:PORT", help="add an RPC server's device")
    devices.add_argument("--json", action="store_true", help="print a JSON list")

    inspect = commands.add_parser("inspect", help="show what is in a state file", description=_inspect.__doc__)
    inspect.set_defaults(command=_inspect)
    inspect.add_argument("file", type=Path, metavar="FILE", help="of this package or of llama.cpp")
    inspect.add_argument("--json", action="store_true", help="print a JSON object")

    build = commands.add_parser("build-llama", help="build the llama-cpp-python adapter", description=_build.__doc__)
    build.set_defaults(command=_build)
    build.add_argument("--force", action="store_true", help="compile anew")
    build.add_argument("-v", "--verbose", action="store_true", help="say what was found, show the compiler's output")

    program = commands.add_parser(
        "exec",
        help="run a llama-cpp-python program on this cache",
        usage="%(prog)s SCRIPT|-m MODULE [ARGUMENT ...]",
        description=_exec.__doc__,
    )
    program.set_defaults(command=_exec, parser=program)

    include = commands.add_parser("include-dir", help="print the folder of the C header", description=_include.__doc__)
    include.set_defaults(command=_include)
    return parser


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


# --- rcache build-llama, rcache exec ---


def _build(args: argparse.Namespace) -> int:
    """Compile the adapter between this package and the installed llama-cpp-python, unless that is done already."""
    from ..hosts.llama.adapter.build import build_command

    return build_command(args.force, args.verbose)


def _exec(args: argparse.Namespace) -> int:
    """Run a Python script or module; its llama_cpp keeps recurrent states in this package's cache."""
    from ..hosts.llama import install

    if args.program[0] != "-m":
        os.stat(args.program[0])  # a missing script is reported before anything is built
    install()
    return 0


def _run_program(words: list[str]) -> None:
    """Runs ``SCRIPT ...`` or ``-m MODULE ...`` as python itself would."""
    if words[0] == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(words[0]).parent.resolve()))
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


# --- rcache include-dir, rcache devices ---


def _include(args: argparse.Namespace) -> int:
    """Print the folder that holds rcache_plugin.h, for a C compiler's -I."""
    from ..capi import INCLUDE

    print(INCLUDE)
    return 0


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


# --- rcache inspect ---


def _inspect(args: argparse.Namespace) -> int:
    """Show what is in a state file: sequences, positions, tokens, tensors, and whether it is intact (exit code 1: it is
    not, or that can't be told)."""
    from ..states.inspect import inspect

    report = inspect(args.file)
    if args.json:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        _show_report(report)
    return 0 if report.intact else EXIT_NOT_INTACT


def _show_report(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    for name, value in _facts(report):
        console.print(f"{name:<13}{value}", soft_wrap=True)
    sequences = report.sequences()
    if sequences:
        table = Table("sequence", "part", "cells", "positions", "tokens")
        for row in sequences:
            span = str(row.pos_max) if row.n_cells == 1 else f"{row.pos_min} .. {row.pos_max}"
            seq_id = "not told" if row.seq_id is None else str(row.seq_id)
            table.add_row(seq_id, row.part, str(row.n_cells), span, "" if row.n_tokens is None else str(row.n_tokens))
        console.print(table)
    if report.parts:
        table = Table("part", "tensors", "type", "bytes of a cell in one", "bytes in all")
        for part in report.parts:
            for column, n in Counter(part.columns).items():
                n_bytes = n * column.row_bytes * len(part.cells)
                table.add_row(part.kind, f"{n} x {column.which}", column.type, str(column.row_bytes), str(n_bytes))
        console.print(table)


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    version = "" if report.version is None else f", version {report.version}"
    yield "file", f"{report.path}: {report.kind}{version}, {report.n_bytes} bytes"
    checked = "its checksum is right" if report.checksum else "it reads to the last byte; the format has no checksum"
    yield "intact", {True: f"yes, {checked}", False: "NO", None: "can't be told"}[report.intact]
    if report.seq_id is not None:
        yield "holds", f"sequence {report.seq_id}"
    elif not report.problems:
        yield "holds", "one sequence" if report.single else "all sequences"
    if report.architecture is not None:
        yield "model", report.architecture
    for part in report.parts:
        layers = "" if part.n_layer is None else f", {part.n_layer} layers"
        streams = f", {part.n_streams} streams" if part.n_streams > 1 else ""
        yield part.kind, f"{len(part.cells)} cells{layers}{streams}, {part.n_bytes} bytes"
    if report.checkpoints:
        yield "checkpoints", f"{len(report.checkpoints)}, of {' '.join(map(str, report.checkpoints))} tokens"
    if report.fingerprint is not None:
        yield "fingerprint", report.fingerprint
    for seq, ids in report.tokens.items():
        of = "tokens" if seq == "prompt" else f"tokens of {seq}"
        yield of, f"{len(ids)}: {' '.join(map(str, ids[:8]))}{' ...' if len(ids) > 8 else ''}"
    for problem in report.problems:
        yield "problem", problem


# --- rcache run ---


@dataclass
class _Sequence:
    """One continuation of the prompt."""

    seq_id: int
    seed: int
    decoder: StreamDecoder
    token: int = 0
    """Sampled last, not decoded yet."""
    text: str = ""
    ended: bool = False
    rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)


@dataclass
class _Figures:
    """Tokens and seconds of the two phases."""

    n_prompt: int = 0
    prompt_seconds: float = 0.0
    n_decoded: int = 0
    decode_seconds: float = 0.0

    def lines(self, n_seqs: int) -> Iterator[str]:
        yield f"prefill: {self.n_prompt} tokens, {_rate(self.n_prompt, self.prompt_seconds)}"
        rate = _rate(self.n_decoded, self.decode_seconds)
        yield f"decode:  {self.n_decoded} tokens, {rate}" + (f" in {n_seqs} sequences" if n_seqs > 1 else "")


def _rate(n_tokens: int, seconds: float) -> str:
    return f"{n_tokens / seconds:.1f} tokens/s" if n_tokens and seconds > 0 else "- tokens/s"


class _Stop:
    """Turns the first Ctrl-C into a request that is met between two steps, so that none is left half done; the second
    interrupts at once."""

    asked = False

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    @contextmanager
    def installed(self) -> Iterator[_Stop]:
        before = signal.signal(signal.SIGINT, self._handle)
        try:
            yield self
        finally:
            signal.signal(signal.SIGINT, before)


class _Bars:
    """Progress bars on stderr while the model loads and the prompt is read; nothing where stderr is no terminal."""

    def __init__(self, owned: ExitStack) -> None:
        self._tasks: dict[str, Any] = {}
        self._progress: Any = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress

            self._progress = owned.enter_context(Progress(console=Console(stderr=True), transient=True))

    def show(self, what: str, fraction: float) -> None:
        """Sets the bar called `what` to `fraction`, 0 to 1."""
        if self._progress is not None:
            if what not in self._tasks:
                self._tasks[what] = self._progress.add_task(what, total=1.0)
            self._progress.update(self._tasks[what], completed=fraction)


def _run(args: argparse.Namespace) -> int:
    """Continue a text with a Mamba GGUF, in one sequence or in several that share the prompt's state."""
    from ..hosts.mamba import bundled_model

    text = sys.stdin.read().removesuffix("\n") if args.prompt == "-" else args.prompt
    if args.seqs > 1 and args.temp == 0:
        print("rcache: with --temp 0 all sequences are the same", file=sys.stderr)
    with _Stop().installed() as stop, ExitStack() as owned:
        with ExitStack() as shown:
            bars = _Bars(shown)
            session = _Session.open(args, args.model or bundled_model(), text, bars, stop, owned)
            session.prefill(bars)
        session.generate(args.n_predict)
        session.report()
        return EXIT_INTERRUPTED if stop.asked else 0


class _Session:
    """A run of the command line: the prompt goes through sequence 0 once, then the other sequences fork from it."""

    def __init__(self, args: argparse.Namespace, context: MambaContext, model: MambaModel, text: str, stop: _Stop):
        self.context = context
        self.stop = stop
        self.n_ubatch: int = args.ubatch
        self.cells: bool = args.cells
        self.streams = args.seqs == 1 and not args.cells
        self.temperature: float = args.temp
        self.prompt_text = text
        self.prompt = _prompt_tokens(model, text)
        self.stop_ids = model.tokenizer.stop_ids
        self.pos = 0
        self.logits: Float32Array | None = None  # of the prompt's last token, float32 [n_vocab]
        decoder = model.tokenizer.stream_decoder
        self.sequences = [_Sequence(i, args.seed + i, decoder()) for i in range(args.seqs)]
        self.figures = _Figures()

    @classmethod
    def open(
        cls, args: argparse.Namespace, path: Path, text: str, bars: _Bars, stop: _Stop, owned: ExitStack
    ) -> _Session:
        """Loads the model; `owned` closes it. Raises `ModelError`, `KeyboardInterrupt`."""
        from ..hosts.mamba import MambaContext, MambaModel

        def progress(fraction: float) -> None:
            if stop.asked:
                raise KeyboardInterrupt
            bars.show("loading", fraction)

        model = owned.enter_context(MambaModel(path, progress=progress))
        context = owned.enter_context(
            MambaContext(
                model,
                n_seq_max=args.seqs,
                n_ubatch=args.ubatch,
                n_threads=args.threads,
                placement=args.placement,
                consecutive_seq_ids=False,  # sequences that have ended leave gaps; one ubatch does for the rest
            )
        )
        return cls(args, context, model, text, stop)

    def prefill(self, bars: _Bars) -> None:
        """Reads the prompt in pieces of one ubatch, so that the bar moves and Ctrl-C need not wait for all of it."""
        started = time.perf_counter()
        for start in range(0, len(self.prompt), self.n_ubatch):
            if self.stop.asked:
                break
            piece = self.prompt[start : start + self.n_ubatch]
            self.pos = start + len(piece)
            last = self.pos == len(self.prompt)
            output = np.zeros(len(piece), dtype=np.bool_)
            output[-1] = last
            logits = self.context.decode(piece, seq_id=0, pos=start, output=output)
            if last:
                self.logits = logits[-1]
            bars.show("reading the prompt", self.pos / len(self.prompt))
        self.figures.n_prompt = self.pos
        self.figures.prompt_seconds = time.perf_counter() - started

    def generate(self, n_predict: int) -> None:
        """Up to `n_predict` tokens of each sequence, until all have ended or Ctrl-C."""
        if self.streams:
            self._print(self.prompt_text)
        if self.logits is None:
            return
        self._show_cells(f"prompt: {self.pos} tokens")
        for sequence in self.sequences[1:]:
            self.context.table.seq_cp(0, sequence.seq_id)
        if len(self.sequences) > 1:
            self._show_cells(f"fork: {len(self.sequences)} sequences share the state of the prompt")
        logits = np.stack([self.logits] * len(self.sequences))
        going = self.sequences
        for step in range(n_predict):
            for sequence, row in zip(going, logits, strict=True):
                self._take(sequence, row)
            going = [sequence for sequence in going if not sequence.ended]
            if not going or self.stop.asked or step == n_predict - 1:
                break
            logits = self._step(going)
            self._show_cells(f"step {step + 1}")
        for sequence in self.sequences:
            self._append(sequence, sequence.decoder.finish())

    def _step(self, going: list[_Sequence]) -> Float32Array:
        """Decodes the last token of each of `going` in one batch; returns float32 [len(going), n_vocab]."""
        tokens = [sequence.token for sequence in going]
        batch = Batch(tokens, pos=[self.pos] * len(going), seq_ids=[sequence.seq_id for sequence in going])
        started = time.perf_counter()
        logits = self.context.decode(batch)
        self.figures.decode_seconds += time.perf_counter() - started
        self.figures.n_decoded += len(going)
        self.pos += 1
        return logits

    def _take(self, sequence: _Sequence, logits: Float32Array) -> None:
        sequence.token = sample(logits, self.temperature, sequence.rng)
        if sequence.token in self.stop_ids:
            sequence.ended = True
        else:
            self._append(sequence, sequence.decoder.push(sequence.token))

    def _append(self, sequence: _Sequence, text: str) -> None:
        sequence.text += text
        if self.streams:
            self._print(text)

    @staticmethod
    def _print(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def report(self) -> None:
        """Ends the streamed line or prints the texts, then the figures on stderr."""
        if self.streams:
            self._print("\n")
        for sequence in [] if self.streams else self.sequences:
            print(f"\n--- sequence {sequence.seq_id} (seed {sequence.seed})\n{self.prompt_text}{sequence.text}")
        sys.stdout.flush()
        for line in self.figures.lines(len(self.sequences)):
            print(line, file=sys.stderr)

    def _show_cells(self, title: str) -> None:
        cache = self.context.cache
        if not self.cells or cache is None:
            return
        from rich.console import Console
        from rich.table import Table

        table = Table("cell", "pos", "sequences", "read from", "", title=title, title_justify="left")
        for row in _cell_rows(cache.table, self.context.table):
            table.add_row(*row)
        Console(highlight=False).print(table)


def _cell_rows(cells: CellTable, table: TableClient) -> Iterator[tuple[str, str, str, str, str]]:
    """The cell table and what the last slot did: cell, pos, sequences, row that its state was read from, marks."""
    info = table.info()
    sources = table.s_copy(info.n) if info.n else ()
    for i in range(info.size):
        cell = cells.cell(i)
        in_slot = info.head <= i < info.head + len(sources)
        marks = ["head"] if i == info.head else []
        marks += ["n"] if i == info.head + info.n - 1 else []
        marks += ["rs_z"] if i == info.rs_z else []
        source = int(sources[i - info.head]) if in_slot else CELL_NONE
        yield (
            str(i),
            "-" if cell.pos == POS_NONE else str(cell.pos),
            " ".join(map(str, cell.seq_ids)) or "-",
            "-" if source == CELL_NONE else str(source),
            " ".join(marks),
        )


def _prompt_tokens(model: MambaModel, text: str) -> list[int]:
    tokens = model.tokenizer.encode(text)
    if not tokens:
        raise InvalidArgument("the prompt is empty, and this model has no token to begin a text with")
    return tokens
