"""Proves rollback to any position with `llama_memory_seq_rm`, as a host in C sees it, for pure and hybrid models.

"Fresh" is the same tokens in a context without checkpoints that was never rolled back. Logits are equal bit for bit
where both were read in the same batches, else within 1e-3 of the largest.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llama_models
import numpy as np
import pytest
from llama_child import Array, Machine
from llama_scripts import N_VOCAB, tokens
from scenarios import Scenarios, path_of

PURE, HYBRIDS = ("mamba", "rwkv7"), ("granite-hybrid", "qwen35")
MODELS = (*PURE, *HYBRIDS)
N_UBATCH, N_BATCH = 16, 64  # of every context here


class Host:
    """A machine with one context under test, 0, and one without checkpoints, 1, to be compared with."""

    def __init__(self, model: str, path: str) -> None:
        import rcache_plugin.hosts.llama as host

        host.install()
        self.host = host
        self.model = model
        self.hybrid = model in HYBRIDS
        self.machine = Machine(Path(path))
        self.lib = self.machine.lib
        self.cache: Any = None
        self.ids: dict[int, list[int]] = {}
        self._callback: Any = None
        with host.context_options(checkpoint_cells=0):
            self.machine.new(1, n_ctx=2048, n_batch=2048, n_ubatch=N_UBATCH, n_seq_max=1)

    def new(self, options: Mapping[str, Any] | None = None, **settings: Any) -> None:
        """Another context under test."""
        if 0 in self.machine.contexts:
            self.machine.free(0)
        with self.host.context_options(**(options or {})) as made:
            wanted = {"n_ctx": 2048, "n_batch": N_BATCH, "n_ubatch": N_UBATCH, "n_seq_max": 4, **settings}
            assert self.machine.new(0, **wanted)
        (self.cache,) = made
        self.ids = {seq: [] for seq in range(wanted["n_seq_max"])}

    @property
    def memory(self) -> Any:
        """Of the context under test."""
        return self.machine.memory(0)

    def status(self, add: Mapping[int, Sequence[int]], *, outputs: str = "last") -> tuple[int, Array | None]:
        """Reads tokens into sequences as one batch, where they end by our own record: status and logits."""
        rows = [
            ((seq,), token, len(self.ids[seq]) + i, outputs == "all" or i == len(ids) - 1)
            for seq, ids in add.items()
            for i, token in enumerate(ids)
        ]
        status, logits, _ = self.machine.decode(rows)
        if status == 0:
            for seq, ids in add.items():
                self.ids[seq] += ids
        return status, logits

    def read(self, add: Mapping[int, Sequence[int]], *, outputs: str = "last") -> Array:
        """As `status`, and it succeeds. One sequence after the other when there are too many for one batch."""
        if sum(map(len, add.values())) <= N_BATCH:
            return self._read(add, outputs)
        logits = np.empty((0, 0), np.float32)
        for seq, ids in add.items():
            for first in range(0, len(ids), N_BATCH):
                logits = self._read({seq: ids[first : first + N_BATCH]}, outputs)
        return logits

    def _read(self, add: Mapping[int, Sequence[int]], outputs: str) -> Array:
        status, logits = self.status(add, outputs=outputs)
        assert status == 0, status
        assert logits is not None
        return logits

    def rm(self, seq: int, p0: int, p1: int = -1) -> bool:
        """llama_memory_seq_rm; our record follows when it says true."""
        done = bool(self.lib.llama_memory_seq_rm(self.memory, seq, p0, p1))
        if done and p1 < 0:
            for each in range(len(self.ids)) if seq < 0 else (seq,):
                del self.ids[each][max(p0, 0) :]
        return done

    def cp(self, source: int, target: int) -> None:
        """llama_memory_seq_cp."""
        self.lib.llama_memory_seq_cp(self.memory, source, target, -1, -1)
        self.ids[target] = list(self.ids[source])

    def last(self, seq: int = 0) -> int:
        """llama_memory_seq_pos_max."""
        return int(self.lib.llama_memory_seq_pos_max(self.memory, seq))

    def in_step(self) -> None:
        """Every sequence is where our record says."""
        found = [self.last(seq) for seq in self.ids]
        assert found == [len(ids) - 1 for ids in self.ids.values()], (found, {s: len(i) for s, i in self.ids.items()})

    def fresh(self, ids: Sequence[int], parts: Iterable[int] = ()) -> Array:
        """Logits of the last token of `ids` after a full prefill; `parts` are where batches end before that."""
        self.lib.llama_memory_clear(self.machine.memory(1), True)
        first = 0
        for end in (*parts, len(ids)):
            rows = [((0,), token, first + i, first + i == end - 1) for i, token in enumerate(ids[first:end])]
            status, logits, _ = self.machine.decode(rows, 1)
            assert status == 0, status
            first = end
        assert logits is not None
        return logits

    def fresh_embedded(self, ids: Sequence[int], token: int) -> Array:
        """As `fresh`, of a token after `ids` that were read as embeddings."""
        self.lib.llama_memory_clear(self.machine.memory(1), True)
        assert self.machine.decode([((0,), t, i, i == len(ids) - 1) for i, t in enumerate(ids)], 1, True)[0] == 0
        status, logits, _ = self.machine.decode([((0,), token, len(ids), True)], 1)
        assert status == 0
        assert logits is not None
        return logits

    def continues(self, seq: int = 0, token: int = 9) -> None:
        """The next token of a sequence has the logits of a fresh run."""
        close(self.read({seq: [token]}), self.fresh(self.ids[seq]))

    def lengths(self, seq: int | None = None) -> list[int]:
        """Of the checkpoints."""
        checkpoints = self.cache.checkpoints
        return [each.n_tokens for each in (checkpoints.all() if seq is None else checkpoints.of(seq))]

    @contextmanager
    def aborting(self, after: int) -> Iterator[list[int]]:
        """Inside, decodes end with an abort after so many nodes of their graphs; gives the number of nodes asked."""
        asked = [0]

        def stop(_: Any) -> bool:
            asked[0] += 1
            return asked[0] > after

        self._callback = self.lib.ggml_abort_callback(stop)
        self.lib.llama_set_abort_callback(self.machine.contexts[0], self._callback, None)
        try:
            yield asked
        finally:
            never = self.lib.ggml_abort_callback(lambda _: False)
            self.lib.llama_set_abort_callback(self.machine.contexts[0], never, None)
            self._callback = never


def close(one: Array, other: Array) -> None:
    """Equal within 1e-3 of the largest."""
    assert one.shape == other.shape
    worst = float(np.abs(one - other).max() / np.abs(other).max())
    assert worst <= 1e-3, worst


def same(one: Array, other: Array) -> None:
    """Equal to the last bit."""
    assert one.shape == other.shape
    assert one.tobytes() == other.tobytes(), float(np.abs(one - other).max())


@contextmanager
def failing(method: str, nth: int = 1, error: type[BaseException] = RuntimeError) -> Iterator[list[int]]:
    """Inside, the `nth` call of a method of `RecurrentCache`, `Observers` or `Rollback` raises, and those after it."""
    from rcache_plugin.cache import RecurrentCache
    from rcache_plugin.cells.observers import Observers
    from rcache_plugin.checkpoints.rollback import Rollback

    owner: Any = next(each for each in (RecurrentCache, Rollback, Observers) if hasattr(each, method))
    original, calls = getattr(owner, method), [0]

    def instead(self: Any, *arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] >= nth:
            raise error("no luck")
        return original(self, *arguments, **options)

    setattr(owner, method, instead)
    try:
        yield calls
    finally:
        setattr(owner, method, original)


scenario = Scenarios(path_of(__file__), MODELS, Host)


# --- every position --------------------------------------------------------------------------------------------------


@scenario()
def every_position_of_a_prompt_and_an_answer(host: Host) -> None:
    """A prompt of several ubatches and an answer of single tokens."""
    host.new({"checkpoint_interval": 16}, n_seq_max=1)
    host.read({0: tokens(37)})
    for token in tokens(7, 1):
        host.read({0: [token]})
    for p0 in range(44, 0, -1):
        assert host.rm(0, p0), p0
        assert host.last() == p0 - 1 == len(host.ids[0]) - 1
        host.continues(token=p0)
    assert host.cache.stats().checkpoints_used > 20


@scenario()
def rollbacks_without_a_prefill_in_between(host: Host) -> None:
    host.new(n_seq_max=1)
    host.read({0: tokens(60)})
    for p0 in (50, 40, 59, 12, 3, 30, 1, 31):
        host.rm(0, min(len(host.ids[0]), 60))
        if len(host.ids[0]) < 60:
            host.read({0: tokens(60)[len(host.ids[0]) :]})
        assert host.rm(0, p0)
        host.in_step()
        host.continues(token=p0)
        assert host.rm(0, p0)
        host.in_step()


@scenario()
def a_checkpoint_of_that_very_place_gives_the_same_bits(host: Host) -> None:
    host.new()
    host.read({0: tokens(20)})
    first = host.read({0: [5]})  # makes a checkpoint of 20 tokens
    host.read({0: tokens(30, 1)})
    before = host.cache.stats().tokens_replayed
    assert host.rm(0, 20)
    again = host.read({0: [5]})
    assert host.cache.stats().tokens_replayed == before
    same(first, again)
    # A prompt of fewer than 32 tokens is split as any other.
    same(first, host.fresh([*tokens(20), 5], [20]))


@scenario()
def removing_nothing_and_removing_all(host: Host) -> None:
    host.new()
    host.read({0: tokens(20)})
    before = host.cache.stats()
    assert host.rm(0, 20) and host.rm(0, 25) and host.rm(0, 7, 7)
    assert host.last() == 19
    same(host.read({0: [5]}), host.fresh([*tokens(20), 5], [20]))
    assert host.cache.stats().checkpoints_used == before.checkpoints_used
    assert host.rm(0, 0)
    assert host.last() == -1
    same(host.read({0: tokens(20, 2)}), host.fresh(tokens(20, 2)))


@scenario()
def more_tokens_than_a_batch_holds(host: Host) -> None:
    host.new(n_seq_max=2)
    host.read({0: tokens(300)})
    host.read({0: [3]})
    for p0 in (301, 300, 299, 130, 64, 1):
        assert host.rm(0, p0)
        host.in_step()
        host.continues()
        host.rm(0, min(p0, 299))
        host.read({0: tokens(300)[len(host.ids[0]) :]})
    host.new({"checkpoint_cells": 1, "checkpoint_interval": 10_000}, n_seq_max=2)
    host.read({0: tokens(200)})
    assert host.rm(0, 180)  # replays 180 tokens, in 3 batches
    host.in_step()
    assert host.cache.stats().tokens_replayed >= 150
    host.continues()


@scenario()
def several_sequences_roll_back_and_the_others_stay(host: Host) -> None:
    host.new()
    host.read({seq: tokens(15, seq) for seq in range(4)})
    for i in range(20):
        host.read({seq: [40 + i + seq] for seq in (3, 0, 2, 1)})
    for seq, p0 in ((2, 20), (0, 34), (3, 15), (1, 3), (2, 19), (0, 1)):
        assert host.rm(seq, p0)
        host.in_step()
    for seq in range(4):
        host.continues(seq, 60 + seq)
    host.read({seq: [70 + seq] for seq in range(4)})
    for seq in (3, 1):
        assert host.rm(seq, len(host.ids[seq]) - 1)
    rows = host.read({seq: [80 + seq] for seq in range(4)})
    for seq in range(4):
        close(rows[seq : seq + 1], host.fresh(host.ids[seq]))


@scenario()
def forks_roll_back_each_for_itself(host: Host) -> None:
    host.new()
    host.read({0: tokens(40)})
    host.read({0: [5]})
    for target in (1, 2, 3):
        host.cp(0, target)
    host.read({seq: [10 + seq] for seq in range(4)})
    assert host.rm(1, 30) and host.rm(2, 41) and host.rm(3, 40)
    host.in_step()
    for seq in range(4):
        host.continues(seq, 20 + seq)
    host.rm(0, -1)
    assert host.rm(2, 25)  # by the checkpoints of the sequence it came from, which is gone
    host.continues(2)
    host.cp(2, 0)
    assert host.rm(0, 10)
    host.continues(0)
    host.continues(2)


@scenario()
def another_sequence_takes_the_place(host: Host) -> None:
    """A sequence id that is used anew does not roll back to what it was before."""
    host.new()
    host.read({1: tokens(40)})
    host.read({1: [5]})
    host.rm(1, -1)
    host.read({1: tokens(30, 1)})
    host.read({1: [5]})
    assert host.rm(1, 29)
    host.in_step()
    host.continues(1)
    host.rm(1, -1)
    host.cp(0, 1)  # an empty one
    assert host.last(1) == -1 and host.rm(1, 5)
    host.read({1: tokens(9, 2)})
    assert host.rm(1, 4)
    host.continues(1)


# --- refusals --------------------------------------------------------------------------------------------------------


@scenario()
def unknown_tokens_are_a_refusal_with_nothing_changed(host: Host) -> None:
    host.new()
    rows = [((0,), token, i, i == 19) for i, token in enumerate(tokens(20))]
    assert host.machine.decode(rows, 0, True)[0] == 0
    host.ids[0] = tokens(20)
    state = host.machine.save(0, 0)
    for p0 in (1, 10, 19):
        assert not host.rm(0, p0)
        assert host.last() == 19
    assert host.cache.stats().refused >= 3
    assert host.machine.save(0, 0) == state
    same(host.read({0: [5]}), host.fresh_embedded(tokens(20), 5))


@scenario()
def tokens_after_embeddings_are_not_guessed(host: Host) -> None:
    """A rollback reaches the state before them, not those behind."""
    host.new()
    host.read({0: tokens(20)})
    host.read({0: [5]})
    assert host.machine.decode([((0,), 7, 21, True)], 0, True)[0] == 0
    assert host.machine.decode([((0,), 8, 22, True)], 0)[0] == 0
    assert not host.rm(0, 22) and host.last() == 22
    assert host.rm(0, 21)
    host.continues()


@scenario()
def a_state_that_was_loaded_has_no_past(host: Host) -> None:
    host.new()
    host.read({0: tokens(40), 1: tokens(9, 1)})
    host.read({0: [5]})
    state = host.machine.save(0, 0)
    host.read({0: [6]})
    assert host.machine.load(state, 0, 0) == len(state)
    host.ids[0] = [*tokens(40), 5]
    host.in_step()
    assert not host.rm(0, 30) and host.last() == 40
    host.continues()
    assert host.machine.load(state, 0, 2) == len(state)
    host.ids[2] = [*tokens(40), 5]
    assert not host.rm(2, 40) and host.last(2) == 40
    host.continues(2)
    assert host.rm(1, 5)
    host.continues(1)


@scenario()
def no_more_than_max_replay_tokens_are_replayed(host: Host) -> None:
    host.new({"max_replay": 10, "checkpoint_interval": 10_000})
    host.read({0: tokens(31)})
    host.read({0: [5]})  # a checkpoint at 31
    for token in tokens(20, 1):
        host.read({0: [token]})
    state = host.machine.save(0, 0)
    for p0 in (45, 42, 30, 11):
        assert not host.rm(0, p0) and host.last() == 51
    assert host.machine.save(0, 0) == state and host.cache.stats().tokens_replayed == 0
    assert host.rm(0, 41)
    assert host.cache.stats().tokens_replayed == 10
    host.continues()
    assert host.rm(0, 10)
    host.continues()
    assert host.cache.stats().tokens_replayed == 20


@scenario()
def without_cells_for_checkpoints_it_is_as_in_stock(host: Host) -> None:
    host.new({"checkpoint_cells": 0})
    host.read({0: tokens(20)})
    assert not host.rm(0, 19) and host.last() == 19
    same(host.read({0: [5]}), host.fresh([*tokens(20), 5], [20]))


@scenario()
def impossible_requests_change_nothing(host: Host) -> None:
    host.new()
    host.read({0: tokens(20), 1: tokens(5, 1)})
    for seq in (4, 99, 1 << 20):
        assert not host.lib.llama_memory_seq_rm(host.memory, seq, 3, -1)
    assert not host.lib.llama_memory_seq_rm(host.memory, -1, 3, -1)
    host.in_step()
    host.continues()


# --- hybrids: both halves --------------------------------------------------------------------------------------------


@scenario(*HYBRIDS)
def the_attention_half_rolls_back_with_the_other(host: Host) -> None:
    """Saved states hold both halves: as long as those of a fresh run, so no entry is doubled or missing."""
    host.new(n_seq_max=1)
    for p0 in (1, 15, 31, 32, 39):
        host.rm(0, -1)
        host.read({0: tokens(40)})
        assert host.rm(0, p0)
        n_bytes = len(host.machine.save(0, 0))
        host.fresh(tokens(40)[:p0])
        assert n_bytes == len(host.machine.save(1, 0)), p0


@scenario(*HYBRIDS)
def after_a_removal_in_the_middle_rollback_is_refused(host: Host) -> None:
    """The attention half has lost tokens that the state has read: no replay can give what was there."""
    host.new(n_seq_max=2)
    host.read({0: tokens(40)})
    host.read({0: [5]})
    assert host.lib.llama_memory_seq_rm(host.memory, 0, 4, 10)
    assert not host.rm(0, 38) and host.last() == 40


@scenario()
def after_shifted_positions_rollback_is_refused(host: Host) -> None:
    host.new(n_seq_max=2)
    host.read({0: tokens(40)})
    host.read({0: [5]})
    host.lib.llama_memory_seq_rm(host.memory, 0, 4, 10)
    if host.lib.llama_memory_can_shift(host.memory):
        host.lib.llama_memory_seq_add(host.memory, 0, 10, -1, -6)
        assert host.last() == 34
        assert not host.rm(0, 30) and host.last() == 34


@scenario(*PURE)
def any_conversation_continues_any_other(host: Host) -> None:
    """The checkpoints of a sequence that is gone serve the next with the same beginning."""
    host.new(n_seq_max=2)
    host.read({0: tokens(40)})
    host.read({0: [5]})
    host.rm(0, -1)
    n_tokens = host.cache.checkpoints.resume(1, [*tokens(40), 7, 8])
    assert n_tokens == 40
    host.ids[1] = tokens(40)
    host.in_step()
    host.continues(1)


@scenario(*HYBRIDS)
def no_conversation_continues_another(host: Host) -> None:
    """Their attention halves differ."""
    host.new(n_seq_max=2)
    host.read({0: tokens(40)})
    host.read({0: [5]})
    assert host.cache.checkpoints.resume(1, [*tokens(40), 7]) == 0 and host.last(1) == -1
    host.rm(0, -1)
    assert host.lengths() == []


# --- rollback by snapshots (n_rs_seq) --------------------------------------------------------------------------------


@scenario()
def with_snapshots_of_steps_any_position_too(host: Host) -> None:
    """n_rs_seq > 0, which llama.cpp grants to some models; before the snapshots a checkpoint serves."""
    host.new(n_rs_seq=4)
    for p0 in (1, 9, 10, 11, 13, 14, 15, 16):
        host.rm(0, -1)
        host.read({0: tokens(10)})
        host.read({0: tokens(4, 1)}, outputs="all")
        host.read({0: [5]})
        host.read({0: [6]})
        assert host.rm(0, p0), p0
        host.in_step()
        host.continues()
    assert host.cache.stats().checkpoints_used > 0


@scenario()
def a_batch_is_undone_whole_or_in_part(host: Host) -> None:
    """A draft of 5 of which any number is accepted; also none and all."""
    for n_rs_seq in (0, 5):
        host.new(n_rs_seq=n_rs_seq)
        for accepted in range(6):
            host.rm(0, -1)
            host.read({0: tokens(10)})
            host.read({0: [30]})
            host.read({0: tokens(5, 1)}, outputs="all")
            assert host.rm(0, 11 + accepted), accepted
            host.in_step()
            host.continues()
            host.continues(token=4)
            assert host.rm(0, 11)
            host.continues()


@scenario()
def checkpoints_of_rolled_back_states_do_not_change(host: Host) -> None:
    """A checkpoint of a state that is to be read from a snapshot behind its cell."""
    host.new(n_rs_seq=3)
    host.read({0: tokens(20)})
    assert host.rm(0, 18)
    made = host.cache.checkpoints.make(0)
    assert made is not None and made.n_tokens == 18
    for i in range(8):
        host.read({0: [40 + i], 1: [i]})
    assert host.rm(0, 18)
    host.in_step()
    host.continues()
    host.continues(1)


# --- failures --------------------------------------------------------------------------------------------------------


def _n_nodes(host: Host, add: Mapping[int, Sequence[int]]) -> int:
    with host.aborting(1 << 30) as asked:
        host.read(add)
    return asked[0]


@scenario()
def a_decode_that_was_aborted_anywhere_can_be_rolled_back(host: Host) -> None:
    rng = random.Random(3)
    host.new()
    n_nodes = _n_nodes(host, {0: tokens(50)})
    for _ in range(12):
        host.rm(0, -1)
        host.rm(1, -1)
        host.read({0: tokens(40), 1: tokens(6, 1)})
        host.read({0: [5]})
        with host.aborting(rng.randrange(n_nodes)):
            status, _ = host.status({0: tokens(50, 2)})
        assert status == 2, status
        assert host.last() <= 90
        assert host.rm(0, 41)  # as a host does that knows what it has read
        host.in_step()
        host.continues()
        host.continues(1)


@scenario()
def after_an_abort_nothing_continues_by_itself(host: Host) -> None:
    """Without a rollback the next decode is refused, or right."""
    host.new()
    for after in (0, 1, 40, 150):
        host.rm(0, -1)
        host.read({0: tokens(20)})
        with host.aborting(after):
            status, _ = host.status({0: [5]})
        if status == 0:
            host.ids[0].pop()  # it took fewer nodes
            host.rm(0, 20)
        status, logits = host.status({0: [6]})
        if status == 0:
            assert logits is not None
            close(logits, host.fresh(host.ids[0]))


@scenario()
def after_an_abort_the_sequence_starts_at_zero_without_being_removed(host: Host) -> None:
    """Where its position says that it is empty."""
    host.new()
    host.read({0: tokens(20), 1: tokens(5, 1)})
    with host.aborting(30):
        status, _ = host.status({0: [5]})
    assert status == 2
    if host.last() == -1:
        host.ids[0] = []
        status, logits = host.status({0: tokens(12, 2)})
        if status == 0:
            assert logits is not None
            close(logits, host.fresh(tokens(12, 2)))
            host.continues()
    host.continues(1)


@scenario()
def an_abort_with_several_sequences_loses_none(host: Host) -> None:
    host.new()
    host.read({seq: tokens(8, seq) for seq in range(4)})
    host.read({seq: [seq] for seq in range(4)})
    for after in (0, 9, 25, 60):
        with host.aborting(after):
            status, _ = host.status({0: [5], 2: [6], 3: [7]})
        assert status == 2
        for seq in (3, 0, 2):
            assert host.rm(seq, len(host.ids[seq])), seq
        host.in_step()
        for seq in range(4):
            host.continues(seq)


@scenario()
def an_abort_inside_a_replay(host: Host) -> None:
    """False, with nothing changed in a pure model; in a hybrid the sequence is lost until a rollback or a new start."""
    rng = random.Random(4)
    host.new({"checkpoint_interval": 10_000})
    for _ in range(8):
        host.rm(0, -1)
        host.rm(1, -1)
        host.read({0: tokens(60), 1: tokens(6, 1)})
        host.read({0: [5]})
        ids = list(host.ids[0])
        p0 = rng.randrange(2, 58)
        with host.aborting(rng.randrange(100)) as asked:
            done = host.lib.llama_memory_seq_rm(host.memory, 0, p0, -1)
        assert asked[0]
        if done:  # it took fewer nodes
            host.ids[0] = ids[:p0]
        elif not host.hybrid:
            assert host.last() == 60
            host.continues()
            host.ids[0] = [*ids, 9]
        else:
            status, _ = host.status({0: [6]})
            assert status != 0, "a sequence that has lost its state continued"
            host.ids[0] = list(ids)
        p1 = rng.randrange(1, 60)
        assert host.rm(0, p1)  # also where a checkpoint lies that the attention half no longer has
        host.in_step()
        host.continues()
        host.continues(1)


@scenario()
def a_callback_that_raises_inside_a_replay(host: Host) -> None:
    for method in ("prepare", "find_slot"):
        for nth in (1, 2, 3):
            host.new({"checkpoint_interval": 10_000}, n_ubatch=8)
            host.read({0: tokens(30), 1: tokens(6, 1)})
            host.read({0: tokens(30, 1)})
            ids = list(host.ids[0])
            with failing(method, nth) as calls:
                done = host.lib.llama_memory_seq_rm(host.memory, 0, 59, -1)
            if calls[0] < nth:
                assert done
                host.rm(0, 59)
            else:
                assert not done
                if not host.hybrid:
                    assert host.last() == 59
                    host.continues()
                    host.ids[0] = [*ids, 9]
                assert host.rm(0, 50)
            host.in_step()
            host.continues()
            host.continues(1)


@scenario()
def a_callback_that_raises_in_a_decode(host: Host) -> None:
    for method in ("prepare", "find_slot"):
        for nth in (1, 3):
            host.new()
            host.read({0: tokens(20), 1: tokens(6, 1)})
            with failing(method, nth) as calls:
                status, _ = host.status({0: tokens(50, 1)})
            assert (status != 0) == (calls[0] >= nth)
            if status == 0:
                del host.ids[0][20:]
            assert host.rm(0, 20)
            host.in_step()
            host.continues()
            host.continues(1)


@scenario()
def a_seq_rm_that_raises_is_a_refusal(host: Host) -> None:
    host.new()
    host.read({0: tokens(20)})
    for method in ("_roll_back", "seq_rm"):
        with failing(method):
            assert not host.lib.llama_memory_seq_rm(host.memory, 0, 7, -1)
        host.in_step()
    host.continues()


@scenario()
def an_interrupt_in_the_middle_of_a_rollback(host: Host) -> None:
    """Whatever is raised, at each step of it: the sequence is where it was, rolled back, or lost; never wrong."""
    for method in ("_hold", "_go_to", "_replay", "changed"):
        host.new({"checkpoint_interval": 10_000})
        host.read({0: tokens(40), 1: tokens(6, 1)})
        with failing(method, error=KeyboardInterrupt):
            host.lib.llama_memory_seq_rm(host.memory, 0, 7, -1)
        assert host.rm(0, 5), method
        host.in_step()
        host.continues()
        host.continues(1)
        host.cache.table.check()


@scenario()
def an_abandoned_state_does_not_evict_the_checkpoint_that_replaces_it(host: Host) -> None:
    for p0 in (40, 41, 55):
        host.new({"checkpoint_cells": 2})
        host.read({0: tokens(20)})
        host.cache.checkpoints.mark(0)
        host.read({0: tokens(20, 1)})
        host.cache.checkpoints.mark(0)
        for token in tokens(50, 2):
            host.read({0: [token]})
        assert host.lengths() == [20, 40]
        assert host.rm(0, p0)  # leaves 50 tokens behind, worth a checkpoint
        host.in_step()
        host.continues()


@scenario()
def a_sequence_that_was_lost_and_removed_has_no_past(host: Host) -> None:
    """Neither has one that starts anew without a removal."""
    for removed in (True, False):
        host.new()
        host.read({0: tokens(40)})
        host.read({0: [5]})
        with host.aborting(20):
            assert host.status({0: [6]})[0] == 2
        assert host.last() == -1
        if removed:
            assert host.rm(0, -1)
        host.ids[0] = []
        host.read({0: tokens(60, 1)})
        host.read({0: [7]})
        for p0 in (58, 50, 41, 40, 39):
            assert host.rm(0, p0)
            host.in_step()
            host.continues()


@scenario()
def a_replay_that_failed_ends_what_lay_behind_it(host: Host) -> None:
    """In a hybrid the attention half was cut for it: a later checkpoint has no other half any more."""
    host.new({"checkpoint_interval": 10_000})
    for i in range(4):
        host.read({0: tokens(30, i)})
        host.cache.checkpoints.mark(0)
    host.read({0: [5]})
    with host.aborting(10):
        assert not host.lib.llama_memory_seq_rm(host.memory, 0, 50, -1)
    for p0 in (110, 95, 90, 61, 45):
        assert host.rm(0, p0), p0
        host.in_step()
        host.continues()


# --- cells and memory ------------------------------------------------------------------------------------------------


@scenario()
def few_cells_for_checkpoints_are_never_an_error(host: Host) -> None:
    """All sequences live, one cell or two for checkpoints, some of them held."""
    for cells in (1, 2):
        host.new({"checkpoint_cells": cells, "checkpoint_interval": 8})
        rng = random.Random(cells)
        for step in range(40):
            host.read({seq: tokens(rng.randint(1, 9), step * 7 + seq) for seq in rng.sample(range(4), 3)})
            if step == 20:
                assert host.cache.checkpoints.make(0) is not None
            seq = rng.randrange(4)
            if host.ids[seq] and rng.random() < 0.4:
                assert host.rm(seq, rng.randint(1, len(host.ids[seq])))
                host.in_step()
            if max(map(len, host.ids.values())) > 200:
                break
        for seq in range(4):
            host.continues(seq)
        assert host.cache.table.used <= 4 + cells and len(host.lengths()) <= cells
        if cells == 1:
            assert host.cache.stats().checkpoints_skipped > 0


@scenario()
def memory_is_bounded_by_bytes_and_freed_on_clear(host: Host) -> None:
    host.new()
    cell = host.cache.spec.cell_bytes
    host.new({"checkpoint_bytes": 3 * cell + 1, "checkpoint_interval": 16})
    assert host.cache.checkpoints.n_bytes == 3 * cell and host.cache.table.size == 4 + 3
    host.read({0: tokens(200)})
    host.read({1: tokens(100, 1)})
    stats = host.cache.stats()
    assert stats.checkpoints <= 3 and stats.bytes == 3 * cell and stats.checkpoints_evicted > 0
    assert host.rm(0, 150)
    host.continues()
    host.lib.llama_memory_clear(host.memory, True)
    assert host.lengths() == [] and host.cache.table.used == 0


@scenario()
def a_state_file_is_the_same_with_checkpoints(host: Host) -> None:
    host.new({"checkpoint_interval": 16}, n_seq_max=1)
    host.read({0: tokens(29)})
    host.read({0: [5]})
    assert host.lengths()
    host.fresh([*tokens(29), 5], [29])
    for seq in (0, None):
        ours, plain = host.machine.save(0, seq), host.machine.save(1, seq)
        assert len(ours) == len(plain)
    assert host.machine.save(0, 0) == host.machine.save(1, 0)


@scenario()
def whole_states_come_and_go_while_checkpoints_stay(host: Host) -> None:
    host.new({"checkpoint_cells": 3})
    host.read({0: tokens(40), 1: tokens(7, 1)})
    host.read({0: [5], 1: [6]})
    ids = {seq: list(each) for seq, each in host.ids.items()}
    whole = host.machine.save(0)
    host.read({0: tokens(30, 2), 2: tokens(9, 3)})
    assert host.machine.load(whole, 0) == len(whole)
    host.ids = {seq: list(each) for seq, each in ids.items()}
    host.in_step()
    for seq in (0, 1):
        assert not host.rm(seq, 3)  # nobody knows what it has read
        host.continues(seq)
    host.rm(0, -1)
    host.read({0: tokens(40)})
    assert host.rm(0, 30)
    host.continues()


@scenario()
def a_context_is_freed_with_live_checkpoints(host: Host) -> None:
    from rcache_plugin.errors import RcacheError

    host.new()
    host.read({0: tokens(40)})
    made, cache = host.cache.checkpoints.make(0), host.cache
    host.read({0: [5]})
    host.machine.free(0)
    assert cache.closed and made is not None
    calls = cache.checkpoints
    for use in (lambda: calls.restore(made, 0), lambda: calls.release(made), lambda: calls.all()):
        try:
            use()
        except RcacheError as error:
            assert "closed" in str(error)
        else:
            raise AssertionError("used after its context was freed")
    host.new()
    host.read({0: tokens(9)})
    host.continues()


@scenario()
def a_prompt_is_split_no_finer_for_checkpoints(host: Host) -> None:
    """One more ubatch a prompt, for its last token, and only in pure models; none in decoding, and none for a full
    batch, which is a piece of a longer prompt."""
    counts = []
    for options in ({"checkpoint_cells": 0}, {"checkpoint_interval": 16}):
        host.new(options, n_seq_max=1)
        with failing("find_slot", 1 << 30) as calls:
            host.read({0: tokens(64)})
            assert calls[0] == 4
            host.read({0: tokens(60, 1)})
            for i in range(10):
                host.read({0: [i]})
        counts.append(calls[0])
    assert counts == [18, 18 + (not host.hybrid)]


@scenario()
def a_continued_prompt_needs_no_checkpoint(host: Host) -> None:
    host.new({"checkpoint_cells": 1})
    for i in range(5):
        assert host.rm(0, len(host.ids[0]))
        host.read({0: tokens(20, i)})
    host.continues()
    stats = host.cache.stats()
    assert stats.tokens_read == 101 and stats.tokens_replayed == stats.checkpoints_used == 0


@scenario()
def classic_placement_and_consecutive_ids(host: Host) -> None:
    host.new({"placement": "classic", "consecutive_seq_ids": True, "spare_cells": 2})
    for i in range(6):
        host.read({seq: tokens(5 + i, seq + 4 * i) for seq in range(4)})
        host.read({2: [i], 0: [i]})
        for seq in range(4):
            assert host.rm(seq, max(1, len(host.ids[seq]) - 3 - seq))
        host.in_step()
        for seq in range(4):
            host.continues(seq)


# --- random operations -----------------------------------------------------------------------------------------------


@scenario()
def random_operations_on_several_sequences(host: Host) -> None:
    """Prefill, decode, rollback, forks, removals, failures, saved states: every sequence always as a fresh run."""
    kinds = {"read": 6, "one": 8, "rollback": 8, "cp": 2, "rm": 1, "abort": 2, "save": 1, "load": 1}
    for seed in range(2):
        rng = random.Random(seed)
        options = {"checkpoint_cells": rng.choice((1, 2, 5, 16)), "checkpoint_interval": rng.choice((8, 32, 512))}
        if rng.random() < 0.3:
            options["placement"] = "classic"
        host.new(options, n_rs_seq=rng.choice((0, 3)))
        saved: list[tuple[list[int], bytes]] = []
        for step in range(50):
            (kind,) = rng.choices(list(kinds), list(kinds.values()))
            some = rng.sample(range(4), rng.randint(1, 4))
            seq = rng.randrange(4)
            if kind == "read":
                host.read({s: tokens(rng.randint(1, 14), 9 * step + s) for s in some})
            elif kind == "one":
                host.read({s: [rng.randrange(1, N_VOCAB)] for s in some})
            elif kind == "rollback" and host.ids[seq]:
                p0 = rng.randint(1, len(host.ids[seq]) + 1)
                known = len(host.cache.checkpoints.tokens(seq)) >= min(p0, len(host.ids[seq]))
                done = host.rm(seq, p0)
                assert done or not known, (seed, step, seq, p0)
            elif kind == "cp":
                host.cp(seq, rng.randrange(4))
            elif kind == "rm":
                host.rm(seq, -1)
            elif kind == "abort":
                with host.aborting(rng.randrange(60)):
                    status, _ = host.status({seq: tokens(rng.randint(1, 20), step)})
                if status and not host.rm(seq, len(host.ids[seq])):
                    assert len(host.cache.checkpoints.tokens(seq)) < len(host.ids[seq]), (seed, step)
                    host.rm(seq, -1)
            elif kind == "save" and host.ids[seq]:
                saved.append((list(host.ids[seq]), host.machine.save(0, seq)))
            elif kind == "load" and saved:
                ids, state = rng.choice(saved)
                assert host.machine.load(state, 0, seq) == len(state)
                host.ids[seq] = list(ids)
            host.in_step()
            host.cache.table.check()
            if host.ids[seq] and rng.random() < 0.5:
                host.continues(seq, rng.randrange(1, N_VOCAB))


@pytest.mark.parametrize(("model", "name"), scenario.cases())
def test_rollback(model: str, name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    said = scenario.outcome(model, name, lambda: str(llama_models.write(model, tmp_path_factory.mktemp("models"))))
    assert not said, said


if __name__ == "__main__":
    sys.exit(scenario.main())
