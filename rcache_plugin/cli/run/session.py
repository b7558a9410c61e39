"""A run of ``rcache run``: the prompt is read once, then continued in one sequence or in several."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from ...cells.batch import Batch
from ...cells.ubatch import Float32Array
from ...errors import InvalidArgument, counted
from ...hosts.mamba import MambaContext, MambaModel
from ...hosts.mamba.sampling import sample
from .cells import show_cells
from .sequence import Figures, Sequence
from .terminal import Bars, Stop


class Session:
    """A run of the command line: the prompt goes through sequence 0 once, then the other sequences fork from it."""

    def __init__(self, args: argparse.Namespace, context: MambaContext, model: MambaModel, text: str, stop: Stop):
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
        self.sequences = [Sequence(i, args.seed + i, decoder()) for i in range(args.seqs)]
        self.figures = Figures()

    @classmethod
    def open(
        cls, args: argparse.Namespace, path: Path, text: str, bars: Bars, stop: Stop, owned: ExitStack
    ) -> Session:
        """Loads the model; `owned` closes it. Raises `ModelError`, `KeyboardInterrupt`."""
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

    def prefill(self, bars: Bars) -> None:
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
        self._show_cells(f"prompt: {counted(self.pos, 'token')}")
        for sequence in self.sequences[1:]:
            self.context.table.seq_cp(0, sequence.seq_id)
        if len(self.sequences) > 1:
            self._show_cells(f"fork: {len(self.sequences)} sequences share the state of the prompt")
        logits = np.stack([self.logits] * len(self.sequences))
        going = self.sequences
        for step in range(n_predict):
            for sequence, row in zip(going, logits, strict=True):
                self._append(sequence, sequence.take(sample(row, self.temperature, sequence.rng), self.stop_ids))
            going = [sequence for sequence in going if not sequence.ended]
            if not going or self.stop.asked or step == n_predict - 1:
                break
            logits = self._step(going)
            self._show_cells(f"step {step + 1}")
        for sequence in self.sequences:
            self._append(sequence, sequence.decoder.finish())

    def _step(self, going: list[Sequence]) -> Float32Array:
        """Decodes the last token of each of `going` in one batch; returns float32 [len(going), n_vocab]."""
        tokens = [sequence.token for sequence in going]
        batch = Batch(tokens, pos=[self.pos] * len(going), seq_ids=[sequence.seq_id for sequence in going])
        started = time.perf_counter()
        logits = self.context.decode(batch)
        self.figures.decode_seconds += time.perf_counter() - started
        self.figures.n_decoded += len(going)
        self.pos += 1
        return logits

    def _append(self, sequence: Sequence, text: str) -> None:
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
        if self.cells and cache is not None:
            show_cells(title, cache.table, self.context.table)


def _prompt_tokens(model: MambaModel, text: str) -> list[int]:
    tokens = model.tokenizer.encode(text)
    if not tokens:
        raise InvalidArgument("the prompt is empty, and this model has no token to begin a text with")
    return tokens
