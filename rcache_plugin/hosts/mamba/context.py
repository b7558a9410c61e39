"""A context of the reference host: tokens go through a model, one state a sequence in a cache."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from ...cache import RecurrentCache
from ...capi.client import TableClient
from ...capi.vtable import HostVTable
from ...cells.batch import Batch, out_ids, split_equal
from ...cells.ubatch import BoolArray, Float32Array, UBatch
from ...errors import ClosedError, InvalidArgument, RcacheError, Status, counted
from ...memory.ggml import GgmlLib
from .args import check_embd, check_tokens, flags_of, flags_of_batch, token_ids
from .model import MambaModel
from .run import Runner
from .weights import default_threads, load_ggml


class CacheFull(RcacheError):
    """A batch does not fit into the cache's cells. Nothing has changed."""

    status = Status.NO_SLOT


class MambaContext:
    """Runs tokens through a model, with one state a sequence in a cache.

    `n_seq_max`: sequence ids are ``0 .. n_seq_max - 1``. `n_cells`: default one a sequence. `n_ubatch`: most tokens of
    one graph; longer batches are split. `n_threads`: default all cores that the process may use. `placement` and
    `consecutive_seq_ids`: as `RecurrentCache` and `split_equal` have them. `cache`: one to use instead of a new one
    (then `n_seq_max`, `n_cells`, `placement` do not matter); it stays open when the context closes. `table`: address
    of the ``struct rcache_vtable`` of any cache, which stays the caller's; `cache` is None then.

    The cache may be changed between steps through `table` or `cache`, resized too. One thread at a time.

    Raises `InvalidArgument`, `AllocationError`, `BackendError`, and `ClosedError` for a closed model or cache. After
    `close`, or once the model is closed, every call raises `ClosedError`.
    """

    cache: RecurrentCache | None
    table: TableClient

    def __init__(
        self,
        model: MambaModel,
        *,
        n_seq_max: int = 1,
        n_cells: int | None = None,
        n_ubatch: int = 512,
        n_threads: int | None = None,
        placement: str = "classic",
        consecutive_seq_ids: bool = True,
        cache: RecurrentCache | None = None,
        table: int | None = None,
    ) -> None:
        if model.closed:
            raise ClosedError("the model is closed")
        if cache is not None and table is not None:
            raise InvalidArgument("give either a cache or a table")
        if n_ubatch < 1:
            raise InvalidArgument(f"n_ubatch is {n_ubatch}, it must be at least 1")
        self.model = model
        self.n_ubatch = n_ubatch
        self.n_threads = default_threads() if n_threads is None else n_threads
        self.consecutive_seq_ids = consecutive_seq_ids
        self._lock = threading.RLock()
        # Closed from the last entry to the first: graphs, table, cache. Holds no reference to this object.
        owned = contextlib.ExitStack()
        try:
            if table is None:
                if cache is None:
                    ggml_folder = Path(str(load_ggml().__file__)).parent / "lib"
                    cache = RecurrentCache(
                        model.spec,
                        n_seq_max if n_cells is None else n_cells,
                        n_seq_max=n_seq_max,
                        placement=placement,
                        ggml=GgmlLib.find(ggml_folder),
                    )
                    owned.callback(cache.close)
                vtable = HostVTable(cache)
                owned.callback(vtable.close)
                table = vtable.address
            self.cache = cache
            self.table = TableClient(table)
            n_layer = self.table.info().n_layer
            if n_layer != model.n_layer:
                raise InvalidArgument(f"the cache is for {counted(n_layer, 'layer')}, the model has {model.n_layer}")
            self._runner = Runner(model.params, model._weights, self.table, n_ubatch, self.n_threads)
            owned.callback(self._runner.close)
        except BaseException:
            owned.close()
            raise
        self._release = weakref.finalize(self, owned.close)
        model._contexts.add(self)

    # lifetime

    @property
    def closed(self) -> bool:
        """Whether the context or its model was closed."""
        return not self._release.alive

    def close(self) -> None:
        """Frees the graphs, then the table and the cache if they are the context's own. Idempotent.

        Waits for a `decode` of another thread.
        """
        with self._lock:
            self._release()

    def __enter__(self) -> MambaContext:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def n_graph_builds(self) -> int:
        """Steps for which a graph was built."""
        return self._runner.n_graph_builds

    @property
    def n_graph_reuses(self) -> int:
        """Steps that used a graph of an earlier one."""
        return self._runner.n_graph_reuses

    # steps

    def decode(
        self,
        tokens: Sequence[int] | npt.NDArray[Any] | Batch,
        seq_id: int = 0,
        pos: int | None = None,
        output: str | npt.ArrayLike | None = None,
    ) -> Float32Array:
        """Runs tokens through the model and returns logits, float32 [n_outputs, n_vocab], in the order of the batch.

        `tokens`: ids of one sequence, `seq_id`, from position `pos` on (default: where the sequence ends); a float32
        array [n_tokens, n_embd] is taken as embeddings. Or a `Batch` of several sequences, which has all of its own.
        `output`: ``"last"`` (the last token of each sequence set; the default, for a `Batch` its own flags), ``"all"``,
        or bool [n_tokens].

        The batch is checked to fit first, so `CacheFull` leaves everything as it was. When a step fails, its sequences
        are removed from the cache (earlier ubatches of the batch have been taken in) and `BackendError` is raised, or
        what stopped it. Raises `InvalidArgument` for what can't be, `ClosedError`, and `RcacheError` while another
        thread is in here.
        """
        # ggml computes without Python's lock: two threads at once would write over each other's inputs
        if not self._lock.acquire(blocking=False):
            raise RcacheError("the context is in use by another thread; each needs its own, they may share a model")
        try:
            if self.closed:
                raise ClosedError("the context is closed" if not self.model.closed else "the model is closed")
            self._runner.bind()
            return self._decode(tokens, seq_id, pos, output)
        finally:
            self._lock.release()

    def _decode(
        self,
        tokens: Sequence[int] | npt.NDArray[Any] | Batch,
        seq_id: int,
        pos: int | None,
        output: str | npt.ArrayLike | None,
    ) -> Float32Array:
        if isinstance(tokens, Batch):
            if pos is not None or seq_id != 0:
                raise InvalidArgument("a Batch has its own sequence ids and positions")
            return self._decode_batch(tokens, flags_of_batch(tokens, output))
        ubatch = self._single(tokens, seq_id, pos, output)
        if isinstance(ubatch, Batch):
            return self._decode_batch(ubatch, ubatch.output)
        logits = self._step(ubatch)
        return np.empty((0, self.model.n_vocab), np.float32) if logits is None else logits.copy()

    def _single(
        self, tokens: Sequence[int] | npt.NDArray[Any], seq_id: int, pos: int | None, output: str | npt.ArrayLike | None
    ) -> UBatch | Batch:
        """The tokens of one sequence: a ubatch if they fit in one, which saves the splitting at each single step."""
        if isinstance(tokens, np.ndarray) and tokens.ndim == 2 and tokens.dtype.kind == "f":
            token, embd, n_tokens = None, tokens, len(tokens)
            check_embd(tokens, self.model.n_embd)
        else:
            token, embd = token_ids(tokens), None
            n_tokens = len(token)
            check_tokens(token, self.model.n_vocab)
        if n_tokens == 0:
            raise InvalidArgument("there are no tokens to decode")
        if pos is None:
            pos = self.table.seq_pos_max(seq_id) + 1
        flags = flags_of(output, n_tokens)
        if flags is None:
            flags = np.zeros(n_tokens, dtype=np.bool_)
            flags[-1] = True
        positions = np.arange(pos, pos + n_tokens)
        if n_tokens > self.n_ubatch:
            return Batch(token, positions, [seq_id] * n_tokens, flags, embd)
        return UBatch([(seq_id,)], positions, token, embd, flags)

    def _decode_batch(self, batch: Batch, flags: BoolArray) -> Float32Array:
        if batch.tokens is not None:
            check_tokens(batch.tokens, self.model.n_vocab)
        if batch.embd is not None:
            check_embd(batch.embd, self.model.n_embd)
        if flags is not batch.output:
            batch = Batch(batch.tokens, batch.pos, batch.seq_ids, flags, batch.embd)
        ubatches = split_equal(batch, self.n_ubatch, self.consecutive_seq_ids)
        if not self.table.prepare(ubatches):
            pieces = "1 ubatch" if len(ubatches) == 1 else f"{len(ubatches)} ubatches"
            raise self._full(f"{counted(batch.n_tokens, 'token')} in {pieces}")
        ids = out_ids(ubatches)
        row_of = np.empty(ids.size, dtype=np.int64)
        row_of[np.argsort(ids)] = np.arange(ids.size)
        result = np.empty((ids.size, self.model.n_vocab), dtype=np.float32)
        done = 0
        for ubatch in ubatches:
            logits = self._step(ubatch)
            if logits is not None:
                result[row_of[done : done + len(logits)]] = logits
                done += len(logits)
        return result

    def _step(self, ubatch: UBatch) -> Float32Array | None:
        try:
            slot = self.table.find_slot(ubatch)
        except RcacheError:
            raise
        except BaseException:
            # Ctrl-C in the middle: the slot may be committed. A state too few is better than one that is wrong.
            with contextlib.suppress(RcacheError):
                self.table.discard_slot()
            raise
        if slot is None:
            raise self._full(f"a ubatch of {counted(ubatch.n_seqs, 'sequence')}")
        try:
            return self._runner.run(ubatch, slot, self.table.s_copy(slot.n))
        except BaseException:
            # Ctrl-C too: the table already says that the tokens are in the states
            self.table.discard_slot()
            raise

    def _full(self, what: str) -> CacheFull:
        info = self.table.info()
        return CacheFull(
            f"no room for {what}: {info.used} of {info.size} cells are in use and n_seq_max is {info.n_seq_max}; "
            f"remove a sequence, or make the context with a larger n_cells"
        )
