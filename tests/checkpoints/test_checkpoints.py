"""Proves which checkpoints are made and evicted, and that each state is always that of its tokens, without a model."""

from __future__ import annotations

import os
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from toy_host import ToyHost, state_of

from rcache_plugin import CacheSpec, HostVTable, RecurrentCache, TableClient, UBatch
from rcache_plugin.checkpoints.policy import DefaultPolicy, default_checkpoint_cells
from rcache_plugin.checkpoints.store import Checkpoint
from rcache_plugin.errors import InvalidArgument, SeqIdError, StaleCheckpoint, StateError, Unsupported

EXAMPLES = int(os.environ.get("RCACHE_CHECKPOINT_EXAMPLES", "100"))


def text(n: int, seed: int = 0) -> list[int]:
    return [(seed * 7919 + i * i * 31 + i) % 997 for i in range(n)]


def lengths(host: ToyHost, seq_id: int | None = None) -> list[int]:
    found = host.cache.checkpoints.all() if seq_id is None else host.cache.checkpoints.of(seq_id)
    return [each.n_tokens for each in found]


# --- making ----------------------------------------------------------------------------------------------------------


def test_making_a_checkpoint_copies_no_row() -> None:
    host = ToyHost(1, checkpoint_cells=4)
    host.read({0: text(10)})
    host.rows_moved = 0
    made = host.cache.checkpoints.make(0)
    assert made is not None and made.n_tokens == 10 and host.cache.table.pin_cell(made.pin) == host.cache.table.tail(0)
    rows = list(host.rows)
    host.read({0: [5]})
    assert host.cache.table.pin_cell(made.pin) != host.cache.table.tail(0)  # the sequence has moved on, not the state
    assert sum(a != b for a, b in zip(rows, host.rows, strict=True)) == 1 and host.rows_moved == 0
    host.cache.checkpoints.restore(made, 0)
    assert host.state(0) == state_of(text(10)) and host.rows_moved == 0


def test_the_default_policy_makes_checkpoints_at_the_ends_of_prompts_and_answers() -> None:
    host = ToyHost(1, n_ubatch=100, checkpoint_cells=16)
    host.read({0: text(50)})
    assert lengths(host) == []  # the next step decides what that was
    host.read({0: [1]})
    assert lengths(host) == [50]
    for token in range(5):
        host.read({0: [token]})
    assert lengths(host) == [50]
    host.read({0: text(20, 1)})
    assert lengths(host) == [50, 56]
    host.read({0: [1]})
    assert lengths(host) == [50, 56, 76]


def test_the_last_token_of_a_prompt_by_itself_gives_a_checkpoint_before_it() -> None:
    host = ToyHost(1, n_ubatch=10, checkpoint_cells=16)
    host.read({0: text(31)})
    host.read({0: [1]})
    assert lengths(host) == [30, 31]


def test_long_prompts_and_answers_have_a_checkpoint_every_interval() -> None:
    host = ToyHost(1, n_ubatch=8, checkpoint_cells=16, policy=DefaultPolicy(16))
    host.read({0: text(72)})
    assert lengths(host) == [16, 32, 48, 64]
    for token in range(40):
        host.read({0: [token]})
    assert lengths(host) == [16, 32, 48, 64, 72, 88, 104]


def test_decoding_stays_in_place_between_checkpoints() -> None:
    """Same head, n and rs_z, so that a host's graph can be used again."""
    host = ToyHost(2, checkpoint_cells=8)
    host.read({0: text(9), 1: text(9, 1)})
    host.read({0: [1], 1: [2]})
    host.windows.clear()
    for token in range(300):
        host.read({0: [token], 1: [token]})
    assert len(set(host.windows)) == 1 and host.windows[0][1] == 2 and host.rows_moved == 0


def through_c(cache: RecurrentCache) -> Callable[[int, int], None]:
    """Steps of one token through the C table, which recognises that they are of the same sequence."""
    table = HostVTable(cache)
    client = TableClient(table.address)

    def step(pos: int, token: int) -> None:
        ubatch = UBatch.single(0, pos, 1, [token])
        assert not table.closed and client.prepare([ubatch]) and client.find_slot(ubatch) is not None

    return step


def test_steady_steps_are_recorded_and_end_when_something_is_due() -> None:
    cache = RecurrentCache(CacheSpec.make([4], [4]), 2, allocate=False, checkpoint_cells=8, policy=DefaultPolicy(16))
    step = through_c(cache)
    tokens = [(7 * i) % 50 for i in range(60)]
    for pos, token in enumerate(tokens):
        step(pos, token)
        assert cache.checkpoints.tokens(0).tolist() == tokens[: pos + 1]
        if pos == 40:  # nothing has happened to the table, but the record is another
            tokens[:41] = range(41)
            cache.checkpoints.set_tokens(0, tokens[:41])
    assert [each.n_tokens for each in cache.checkpoints.all()] == [16, 32, 41, 57]
    assert cache.stats().tokens_read == 60
    step(70, 5)  # a gap: what follows is not known
    step(71, 5)
    assert cache.checkpoints.tokens(0).tolist() == tokens and not cache.seq_rm(0, 65, -1)


def test_two_checkpoints_of_the_same_tokens_are_one() -> None:
    host = ToyHost(2, n_ubatch=100, checkpoint_cells=4)
    host.read({0: text(5), 1: text(5)})
    first, second = host.cache.checkpoints.make(0), host.cache.checkpoints.make(1)
    assert first is second and len(host.cache.checkpoints.all()) == 1
    assert host.cache.checkpoints.mark(0) and host.cache.stats().checkpoints_made == 1


def test_a_mark_is_a_checkpoint_of_now() -> None:
    host = ToyHost(1, checkpoint_cells=4)
    host.read({0: text(6)})
    assert host.cache.checkpoints.mark(0)
    host.read({0: text(3, 1)})
    assert lengths(host) == [6] and not host.cache.checkpoints.all()[0].held

def test_an_empty_sequence_gives_no_checkpoint() -> None:
    host = ToyHost(2, checkpoint_cells=4)
    assert host.cache.checkpoints.make(0) is None and not host.cache.checkpoints.mark(1)
    with pytest.raises(SeqIdError):
        host.cache.checkpoints.make(2)


def test_without_cells_for_checkpoints() -> None:
    host = ToyHost(1)
    host.read({0: text(5)})
    assert not host.cache.checkpoints.mark(0) and host.cache.checkpoints.n_cells == host.cache.checkpoints.n_bytes == 0
    for call in (
        lambda: host.cache.checkpoints.make(0),
        lambda: host.cache.checkpoints.all(),
        lambda: host.cache.checkpoints.nearest([1]),
        lambda: host.cache.checkpoints.resume(0, [1]),
        lambda: host.cache.stats(),
    ):
        with pytest.raises(Unsupported, match="checkpoint_cells"):
            call()
    assert not host.cache.seq_rm(0, 3, -1)


def test_cells_by_number_by_bytes_and_by_default() -> None:
    spec = CacheSpec.make([100], [150])  # 1,000 bytes a cell
    assert RecurrentCache(spec, 2, allocate=False, checkpoint_cells=3).table.size == 5
    by_bytes = RecurrentCache(spec, 2, allocate=False, checkpoint_bytes=3999)
    assert (by_bytes.table.size, by_bytes.checkpoints.n_bytes, by_bytes.table.n_seq_max) == (5, 3000, 2)
    assert RecurrentCache(spec, 2, allocate=False, checkpoint_bytes=999).table.size == 2
    snapshots = RecurrentCache(spec, 2, allocate=False, checkpoint_bytes=3999, n_rs_seq=1)
    assert (snapshots.checkpoints.n_cells, snapshots.checkpoints.n_bytes) == (1, 2000)
    assert [default_checkpoint_cells(n) for n in (0, 1000, 24 << 20, 90 << 20, 1 << 40)] == [16, 16, 10, 2, 2]
    with pytest.raises(InvalidArgument):
        RecurrentCache(spec, 2, allocate=False, checkpoint_cells=-1)


# --- receipts --------------------------------------------------------------------------------------------------------


def test_a_released_checkpoint_is_stale_and_its_cell_free() -> None:
    host = ToyHost(1, n_ubatch=100, checkpoint_cells=2)
    host.read({0: text(5)})
    made = host.cache.checkpoints.make(0)
    host.read({0: [1]})
    assert made is not None and made.valid and host.cache.table.used == 2
    host.cache.checkpoints.release(made)
    assert not made.valid and host.cache.table.used == 1 and host.cache.checkpoints.all() == []
    for use in (lambda: host.cache.checkpoints.release(made), lambda: host.cache.checkpoints.restore(made, 0)):
        with pytest.raises(StaleCheckpoint, match="5 tokens is gone: released"):
            use()


def test_another_caches_checkpoint_is_refused() -> None:
    one, other = ToyHost(1, checkpoint_cells=2), ToyHost(1, checkpoint_cells=2)
    for host in (one, other):
        host.read({0: text(5)})
    made = one.cache.checkpoints.make(0)
    assert made is not None and other.cache.checkpoints.make(0) is not None
    with pytest.raises(InvalidArgument, match="another cache"):
        other.cache.checkpoints.restore(made, 0)


def test_held_checkpoints_are_not_evicted_for_those_the_cache_makes() -> None:
    host = ToyHost(1, n_ubatch=100, checkpoint_cells=2)
    held = []
    for n in (5, 3):
        host.read({0: text(n, n)})
        held.append(host.cache.checkpoints.make(0))
    host.read({0: text(9)})
    host.read({0: [1]})
    assert all(each is not None and each.valid for each in held)
    assert host.cache.stats().checkpoints_skipped >= 1 and lengths(host) == [5, 8]
    assert host.cache.checkpoints.make(0) is None  # all cells are held


def test_live_sequences_evict_held_checkpoints() -> None:
    """More sequences than cells for them: a checkpoint is evicted, and says so."""
    host = ToyHost(2, n_ubatch=100, n_seq_max=4, checkpoint_cells=2)
    host.read({0: text(5)})
    made = host.cache.checkpoints.make(0)
    host.read({0: [1], 1: [2], 2: [3], 3: [4]})
    assert made is not None and not made.valid and host.cache.stats().checkpoints_evicted == 1
    with pytest.raises(StaleCheckpoint, match="evicted for a sequence"):
        made.check()
    assert [host.state(s) for s in range(4)] == [state_of([*text(5), 1]), *map(state_of, ([2], [3], [4]))]


def test_live_sequences_evict_what_the_cache_made_by_itself_first() -> None:
    host = ToyHost(2, n_ubatch=100, n_seq_max=3, checkpoint_cells=2)
    host.read({0: text(5)})
    held = host.cache.checkpoints.make(0)
    host.read({0: text(9, 1)})
    host.read({0: [1]})
    assert lengths(host) == [5, 14]
    host.read({1: [1], 2: [2]})
    assert held is not None and held.valid and lengths(host) == [5]


def test_the_least_useful_is_evicted_first() -> None:
    """Of a long prompt the first checkpoint stays, and some after it; the unused are evicted before the used."""
    host = ToyHost(1, n_ubatch=8, checkpoint_cells=4, policy=DefaultPolicy(8))
    host.read({0: text(100)})
    found = lengths(host)
    assert found[0] == 8 and found[-1] == 96 and len(found) == 4

    host = ToyHost(1, n_ubatch=100, checkpoint_cells=3, policy=DefaultPolicy(1000, 1000))
    for seed in range(3):
        host.rm(0)
        host.read({0: text(20, seed)})
        host.read({0: [1]})
    assert host.cache.checkpoints.resume(0, text(20, 0)) == 20
    host.rm(0)
    host.read({0: text(20, 9)})
    host.read({0: [1]})
    found = [host.cache.checkpoints.nearest(text(20, seed)) is not None for seed in (0, 1, 2, 9)]
    assert found == [True, False, True, True]


# --- rollback --------------------------------------------------------------------------------------------------------


def test_a_sequence_rolls_back_to_every_position_that_it_has_read() -> None:
    for p0 in range(1, 41):
        host = ToyHost(1, n_ubatch=8, checkpoint_cells=6, policy=DefaultPolicy(16))
        tokens = text(40)
        host.read({0: tokens})
        assert host.rm(0, p0) and host.cache.seq_pos_max(0) == p0 - 1
        assert host.state(0) == state_of(tokens[:p0])
        assert host.cache.checkpoints.tokens(0).tolist() == tokens[:p0]
        host.read({0: [1, 2, 3]})
        assert host.state(0) == state_of([*tokens[:p0], 1, 2, 3])
        replayed = host.cache.stats().tokens_replayed
        assert replayed == (0 if p0 == 40 else p0 - max([n for n in (16, 32) if n <= p0], default=0))


def test_a_checkpoint_at_the_very_place_needs_no_replay() -> None:
    host = ToyHost(1, n_ubatch=8, checkpoint_cells=6, policy=DefaultPolicy(16))
    host.cache.checkpoints.replay = None
    host.read({0: text(40)})
    assert host.rm(0, 32) and host.state(0) == state_of(text(32)) and host.cache.stats().tokens_replayed == 0
    assert not host.rm(0, 20) and host.cache.seq_pos_max(0) == 31  # refused, and nothing has changed
    assert host.state(0) == state_of(text(32))


def test_a_rollback_to_a_checkpoint_evicts_no_other() -> None:
    """Nothing has to be replayed, so nothing can fail, and the state that is left need not be held meanwhile."""
    host = ToyHost(1, n_ubatch=8, checkpoint_cells=3, policy=DefaultPolicy(1000, 1000))
    made = []
    for seed in range(3):
        host.read({0: text(8, seed)})
        made.append(host.cache.checkpoints.make(0))
    host.read({0: [1, 2]})
    assert host.rm(0, 24) and host.state(0) == state_of([*text(8), *text(8, 1), *text(8, 2)])
    assert all(each is not None and each.valid for each in made) and host.cache.stats().checkpoints_evicted == 0


def test_a_branch_point_becomes_a_checkpoint() -> None:
    host = ToyHost(1, n_ubatch=100, checkpoint_cells=6)
    host.read({0: text(60)})
    assert host.rm(0, 37)
    host.read({0: text(10, 1)})
    assert 37 in lengths(host)
    assert host.cache.checkpoints.nearest(text(60)[:59]) is host.cache.checkpoints.nearest(seq_id=0, pos=40)


def test_a_replay_has_a_budget() -> None:
    host = ToyHost(1, n_ubatch=100, checkpoint_cells=4, max_replay=10)
    host.read({0: text(30)})
    assert not host.rm(0, 11) and host.cache.seq_pos_max(0) == 29 and host.n_replays == 0
    assert host.rm(0, 10) and host.state(0) == state_of(text(10))
    assert host.cache.stats().refused == 1


def test_a_failed_replay_changes_nothing() -> None:
    host = ToyHost(1, n_ubatch=4, checkpoint_cells=4)
    host.read({0: text(30)})
    for fail_at in range(3):
        host.fail_at = fail_at
        assert not host.rm(0, 11)
        assert host.cache.seq_pos_max(0) == 29 and host.state(0) == state_of(text(30))
        assert host.cache.checkpoints.tokens(0).tolist() == text(30)
    assert host.rm(0, 11) and host.state(0) == state_of(text(11))


def test_a_failed_replay_of_a_hybrid_leaves_nothing_half() -> None:
    host = ToyHost(1, n_ubatch=4, checkpoint_cells=4, attention=True)
    host.read({0: text(30)})
    host.fail_at = 1
    assert not host.rm(0, 11)
    assert host.cache.seq_pos_max(0) == -1
    with pytest.raises(StateError, match="lost its state"):
        host._read({0: (30, [1])})
    assert host.rm(0, 11) and host.state(0) == state_of(text(11)) and host.attention == {0: text(11)}


def test_a_failed_step_can_be_rolled_back() -> None:
    """The rows are half written, so the state is gone; the cache has it replayed when the host rolls back."""
    host = ToyHost(2, n_ubatch=8, checkpoint_cells=4)
    host.read({0: text(20), 1: text(5, 1)})
    host.fail_at = 1
    assert not host.read({0: text(20, 2)})
    assert host.cache.seq_pos_max(0) == -1 and host.state(1) == state_of(text(5, 1))
    with pytest.raises(StateError, match="sequence 0 lost its state"):
        host._read({0: (20, [1])})
    assert host.rm(0, 20) and host.state(0) == state_of(text(20))
    host.fail_at = 0
    assert not host.read({0: [1]})
    assert host.rm(0) and host.read({0: [3]}) and host.state(0) == state_of([3])


def test_a_lost_sequence_is_refused_without_a_prepare_too() -> None:
    host = ToyHost(1, checkpoint_cells=2)
    host.read({0: text(4)})
    host.fail_at = 0
    assert not host.read({0: [1]})
    with pytest.raises(StateError, match="0 lost its state when a step failed, it can't continue at position 4"):
        host.cache.find_slot(UBatch.single(0, 4, 1, [1]))
    assert host.cache.checkpoints.make(0) is None and host.rm(0, 4) and host.state(0) == state_of(text(4))


def test_a_checkpoint_in_a_failed_step_is_gone() -> None:
    """A bystander's row that was to be moved may be half written."""
    host = ToyHost(3, n_ubatch=100, checkpoint_cells=1)
    host.read({0: text(5), 1: text(5, 1), 2: text(5, 2)})
    made = host.cache.checkpoints.make(1)
    host.read({1: [1]})
    assert made is not None and host.cache.table.pin_cell(made.pin) == 1
    host.fail_at = 0
    assert not host.read({0: [1], 2: [1]})  # the cells 0 and 2: the rows between trade places
    assert not made.valid and host.cache.checkpoints.all() == [] and host.state(1) == state_of([*text(5, 1), 1])


def test_sequences_that_read_together_have_read_the_same() -> None:
    host = ToyHost(3, n_ubatch=100, checkpoint_cells=4)
    assert host._compute(UBatch([(0, 2), (1,)], [0, 1, 2] * 2, [5, 6, 7, 8, 9, 10]))
    assert [host.cache.checkpoints.tokens(seq_id).tolist() for seq_id in (2, 1)] == [[5, 6, 7], [8, 9, 10]]
    assert host.rm(2, 2) and host.state(2) == state_of([5, 6]) and host.state(0) == state_of([5, 6, 7])


def test_unknown_tokens_can_not_be_rolled_back() -> None:
    host = ToyHost(1, checkpoint_cells=4)
    host.read({0: text(10)})
    host.cache.seq_add(0, 0, -1, 5)
    assert not host.rm(0, 8) and host.cache.seq_pos_max(0) == 14 and host.cache.checkpoints.tokens(0).tolist() == []
    assert host.cache.checkpoints.make(0) is not None  # a checkpoint all the same, for `restore`
    with pytest.raises(InvalidArgument, match="3 tokens for a sequence of 15"):
        host.cache.checkpoints.set_tokens(0, [1, 2, 3])


# --- across conversations --------------------------------------------------------------------------------------------


def test_a_conversation_needs_no_second_prefill() -> None:
    host = ToyHost(1, n_ubatch=100, checkpoint_cells=8)
    a, b = text(60), text(50, 1)
    host.read({0: a})
    assert host.rm(0)  # the abandoned state becomes a checkpoint
    host.read({0: b})
    host.cache.clear(data=False)
    assert host.cache.checkpoints.resume(0, [*a, 1, 2]) == 60 and host.state(0) == state_of(a)
    assert host.cache.checkpoints.resume(0, [*b, 1]) == 50 and host.state(0) == state_of(b)
    assert host.cache.checkpoints.resume(0, [*b, 1, 2]) == 50  # it has that state already
    assert host.cache.checkpoints.resume(0, b[:20]) == 0 and host.state(0) == state_of(b)  # seq_rm rolls back
    assert host.cache.checkpoints.known_prefix([*a[:30], 0, 0]) == 30


def test_clear_with_data_leaves_nothing() -> None:
    host = ToyHost(1, n_ubatch=100, checkpoint_cells=8)
    host.read({0: text(60)})
    made = host.cache.checkpoints.make(0)
    host.cache.clear(data=True)
    assert made is not None and not made.valid and host.cache.table.used == 0
    assert host.cache.checkpoints.resume(0, text(60)) == 0 and host.cache.checkpoints.known_prefix(text(60)) == 0


def test_checkpoints_outlive_seq_keep_and_removal_except_in_hybrids() -> None:
    for attention in (False, True):
        host = ToyHost(3, n_ubatch=100, checkpoint_cells=8, attention=attention)
        for seq in range(3):
            host.read({seq: text(10 + seq, seq)})
            host.cache.checkpoints.mark(seq)
        host.cache.seq_keep(1)
        assert lengths(host) == ([11] if attention else [10, 11, 12])
        assert host.rm(1)
        assert lengths(host) == ([] if attention else [10, 11, 12])


def test_a_fork_rolls_back_to_its_sources_past() -> None:
    for attention in (False, True):
        host = ToyHost(2, n_ubatch=8, checkpoint_cells=8, attention=attention, policy=DefaultPolicy(8))
        host.read({0: text(30)})
        host.cp(0, 1)
        assert host.rm(1, 17) and host.state(1) == state_of(text(17)) and host.state(0) == state_of(text(30))
        host.read({1: [1, 2]})
        assert host.rm(0, 16) and host.state(0) == state_of(text(16))
        assert host.state(1) == state_of([*text(17), 1, 2])
        assert host.rm(0) and host.rm(1, 8) and host.state(1) == state_of(text(8))


def test_a_hybrid_rolls_back_in_its_own_lineage_only() -> None:
    host = ToyHost(2, n_ubatch=100, checkpoint_cells=8, attention=True)
    host.read({0: text(20)})
    made = host.cache.checkpoints.make(0)
    assert host.cache.checkpoints.resume(1, text(20)) == 0 and host.cache.checkpoints.nearest(text(20)) is None
    assert made is not None
    with pytest.raises(Unsupported, match="seq_rm"):
        host.cache.checkpoints.restore(made, 1)
    host.rm(0, 10)
    assert not made.valid
    with pytest.raises(StaleCheckpoint, match="rolled back beyond"):
        made.check()


def test_resizing_keeps_checkpoints() -> None:
    host = ToyHost(2, n_ubatch=100, checkpoint_cells=3)
    host.read({0: text(20), 1: text(4, 1)})
    made = host.cache.checkpoints.make(0)
    host.read({0: [1], 1: [1]})
    for n_cells, n_seq_max in ((6, 6), (2, 3), (4, 2)):
        rows = {cell: host.rows[cell] for cell in range(host.cache.table.size)}
        before = host.cache.table.copy()
        target = before.copy()
        moves = dict(target.resize(n_cells + 3, n_seq_max))
        host.cache.resize(n_cells, n_seq_max)
        host.rows = [-1] * host.cache.table.size
        for cell in before.used_cells():
            host.rows[moves.get(cell, cell)] = rows[cell]
        assert made is not None and host.pinned(made.pin) == state_of(text(20))
        assert host.state(0) == state_of([*text(20), 1])
    host.cache.checkpoints.restore(made, 1)
    assert host.state(1) == state_of(text(20))


# --- the machine -----------------------------------------------------------------------------------------------------

SEQS = 3
few = st.integers(0, SEQS - 1)


class CheckpointMachine(RuleBasedStateMachine):
    """Any history of operations: a sequence's row is the hash of exactly its tokens, and so is each checkpoint's."""

    attention = False

    @initialize(
        cells=st.integers(1, 5), interval=st.sampled_from([2, 4, 8]), n_ubatch=st.sampled_from([2, 4, 16]),
        placement=st.sampled_from([("classic", False), ("compact", False), ("compact", True)]),
        n_cells=st.sampled_from([SEQS, SEQS, 2]),
    )
    def start(self, cells: int, interval: int, n_ubatch: int, placement: tuple[str, bool], n_cells: int) -> None:
        self.host = ToyHost(
            n_cells, n_seq_max=SEQS, n_ubatch=n_ubatch, checkpoint_cells=cells, placement=placement[0],
            moves=placement[1], policy=DefaultPolicy(interval, 2), attention=self.attention,
        )
        self.tokens: dict[int, list[int]] = {seq_id: [] for seq_id in range(SEQS)}
        self.lost: dict[int, list[int]] = {}  # what a rollback could still reach
        self.receipts: list[Checkpoint] = []

    @rule(seqs=st.lists(few, min_size=1, max_size=SEQS, unique=True), n=st.integers(1, 9), base=st.integers(0, 2))
    def read(self, seqs: list[int], n: int, base: int) -> None:
        seqs = [seq_id for seq_id in seqs if seq_id not in self.lost]
        if not seqs:
            return
        new = {seq_id: [base + i for i in range(n + seq_id % 2)] for seq_id in seqs}
        if self.host.read(new):
            for seq_id, ids in new.items():
                self.tokens[seq_id] += ids
        else:  # more sequences than cells: none of it was read
            assert self.host.cache.table.size - self.host.cache.checkpoints.n_cells < SEQS

    @rule(seq_id=few, n=st.integers(1, 9), fail_at=st.integers(0, 2))
    def fail(self, seq_id: int, n: int, fail_at: int) -> None:
        if self.lost:
            return
        ids = list(range(n))
        before = {s: list(t) for s, t in self.tokens.items()}
        self.host.fail_at = fail_at
        done = self.host.read({seq_id: ids})
        failed, self.host.fail_at = self.host.fail_at is None, None
        if done:
            self.tokens[seq_id] += ids
        elif failed:
            for s in range(SEQS):  # bystanders may have been in the window
                if before[s] and self.host.cache.seq_pos_max(s) < 0:
                    self.lost[s], self.tokens[s] = before[s], []
                    if self.attention:
                        del self.host.attention[s][len(before[s]) :]
            if seq_id not in self.lost and not before[seq_id]:
                self.lost[seq_id] = []

    @rule(seq_id=few, part=st.integers(0, 100))
    def roll_back(self, seq_id: int, part: int) -> None:
        tokens = self.lost.get(seq_id, self.tokens[seq_id])
        p0 = 1 + part * len(tokens) // 100
        if p0 > len(tokens):
            return
        done = self.host.rm(seq_id, p0)
        if not done:
            # only for want of a cell, or because nobody knows the tokens of a bystander that was lost
            assert self.host.cache.table.size - self.host.cache.checkpoints.n_cells < SEQS or seq_id in self.lost
            if self.host.cache.seq_pos_max(seq_id) < 0 and seq_id not in self.lost:
                self.lost[seq_id], self.tokens[seq_id] = tokens, []
            return
        self.lost.pop(seq_id, None)
        self.tokens[seq_id] = tokens[:p0]

    @rule(seq_id=few)
    def remove(self, seq_id: int) -> None:
        assert self.host.rm(seq_id)
        self.tokens[seq_id] = []
        self.lost.pop(seq_id, None)

    @rule(source=few, copy_to=few)
    def copy(self, source: int, copy_to: int) -> None:
        if source in self.lost or copy_to in self.lost:
            return
        self.host.cp(source, copy_to)
        self.tokens[copy_to] = list(self.tokens[source])

    @rule(seq_id=few)
    def keep(self, seq_id: int) -> None:
        self.host.cache.seq_keep(seq_id)
        for other in range(SEQS):
            if other != seq_id:
                self.tokens[other] = []
                self.lost.pop(other, None)
                if self.host.attention is not None:
                    self.host.attention[other] = []

    @rule(data=st.booleans())
    def clear(self, data: bool) -> None:
        self.host.cache.clear(data)
        self.tokens = {seq_id: [] for seq_id in range(SEQS)}
        self.lost = {}
        if self.host.attention is not None:
            self.host.attention = {}
        if data:
            assert self.host.cache.checkpoints.all() == []

    @rule(seq_id=few, held=st.booleans())
    def checkpoint(self, seq_id: int, held: bool) -> None:
        if not held:
            self.host.cache.checkpoints.mark(seq_id)
            return
        made = self.host.cache.checkpoints.make(seq_id)
        if made is not None:
            assert made.n_tokens == len(self.tokens[seq_id])
            self.receipts.append(made)

    @precondition(lambda self: self.receipts)
    @rule(which=st.integers(0, 99), seq_id=few, release=st.booleans())
    def use(self, which: int, seq_id: int, release: bool) -> None:
        made = self.receipts.pop(which % len(self.receipts))
        if release:
            if made.valid:
                self.host.cache.checkpoints.release(made)
            with pytest.raises(StaleCheckpoint):
                self.host.cache.checkpoints.release(made)
        elif made.valid and not self.attention:
            tokens = list(made.tokens or [])
            self.host.cache.checkpoints.restore(made, seq_id)
            self.tokens[seq_id] = tokens
            self.lost.pop(seq_id, None)

    @rule(seq_id=few, other=few, extra=st.lists(st.integers(0, 2), max_size=4))
    def resume(self, seq_id: int, other: int, extra: list[int]) -> None:
        wanted = self.tokens[other] + extra
        if seq_id in self.lost:
            return
        n = self.host.cache.checkpoints.resume(seq_id, wanted)
        if n:
            self.tokens[seq_id] = wanted[:n]

    @invariant()
    def states_are_those_of_their_tokens(self) -> None:
        if not hasattr(self, "host"):
            return
        cache = self.host.cache
        cache.table.check()
        for seq_id, tokens in self.tokens.items():
            assert cache.seq_pos_max(seq_id) == len(tokens) - 1
            assert self.host.state(seq_id) == state_of(tokens)
            if seq_id not in self.lost and tokens:
                assert cache.checkpoints.tokens(seq_id).tolist() == tokens
            if self.host.attention is not None and seq_id not in self.lost:
                assert self.host.attention.get(seq_id, []) == tokens
        found = cache.checkpoints.all()
        assert len({cache.table.pin_cell(each.pin) for each in found}) <= cache.checkpoints.n_cells
        for each in found:
            assert each.tokens is not None and self.host.pinned(each.pin) == state_of(each.tokens)
        used = {each for each in range(cache.table.size) if cache.table.cell(each).pins}
        assert used == {cache.table.pin_cell(each.pin) for each in found}  # no pin is leaked


class LineageMachine(CheckpointMachine):
    """The same beside an attention half, which always holds exactly the sequence's tokens."""

    attention = True


TestCheckpointMachine = CheckpointMachine.TestCase
TestLineageMachine = LineageMachine.TestCase
for _case in (TestCheckpointMachine, TestLineageMachine):
    _case.settings = settings(
        max_examples=EXAMPLES, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
    )
