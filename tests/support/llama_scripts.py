"""The scripts with which stock llama.cpp and our cache are compared, for any recurrent or hybrid model."""

from __future__ import annotations

import random
from collections.abc import Sequence

from llama_child import ON_DEVICE, PARTIAL, Script

N_VOCAB = 128
"""Tokens are drawn below this; every model that is compared has more."""


def tokens(n: int, seed: int = 0) -> list[int]:
    """`n` tokens."""
    rng = random.Random(seed)
    return [rng.randrange(1, N_VOCAB) for _ in range(n)]


def prefill_and_decode() -> Script:
    """A prompt over several ubatches, then one token at a time."""
    script = Script("prefill and decode").decode({0: tokens(50)})
    for i in range(5):
        script.decode({0: [10 + i]})
    return (
        script.decode({0: tokens(16, 1)})
        .decode({0: tokens(17, 2)}, outputs="all")
        .decode({0: tokens(3, 3)}, outputs="none")
    )


def four_lengths() -> Script:
    """Four sequences of different length in one batch, then any of them together."""
    prompts = {0: tokens(5), 1: tokens(33, 1), 2: tokens(1, 2), 3: tokens(19, 3)}
    script = Script("four lengths").decode(prompts)
    for i in range(3):
        script.decode({s: [20 + 4 * i + s] for s in range(4)})
    for seqs in ((1, 3), (0,), (3, 2), (2, 0, 1), (3,), (1, 2)):
        script.decode({s: [40 + s] for s in seqs})
    return script.decode({3: tokens(7, 4), 1: tokens(18, 5)}, interleave=True)


def two_threads() -> Script:
    """The same number of threads in ggml on both sides, more than one."""
    script = Script("two threads", n_threads=2, n_threads_batch=2).decode({0: tokens(20), 1: tokens(5, 1)})
    return script.cp(0, 2).decode({0: [5], 1: [6], 2: [7]}).decode({2: [8]})


def interleaved() -> Script:
    """Sequences that start late and decode in turn."""
    script = Script("interleaved").decode({2: tokens(20)})
    for i in range(4):
        script.decode({2: [30 + i]}).decode({0: tokens(3, i)})
    script.decode({3: tokens(11, 7)})
    for i, seq in enumerate((0, 3, 2, 3, 0, 2, 2, 1, 0)):
        script.decode({seq: [50 + i]})
    return script


def fork() -> Script:
    """A prompt that two, then three sequences continue; a fork onto a sequence that had a state."""
    script = Script("fork").decode({0: tokens(20)}).cp(0, 1).cp(0, 3)
    script.decode({0: [11], 1: [12]}).decode({1: [13], 0: [14]}).decode({3: [15]})
    script.decode({2: tokens(9, 1)}).decode({2: [16], 0: [17]})
    script.cp(1, 2).cp(2, 2).decode({1: [18]}).decode({2: [18]}).decode({2: [19], 1: [20], 0: [21], 3: [22]})
    return script.cp(0, 3).rm(0).decode({3: [23]}).decode({0: tokens(6, 2)})


def keep() -> Script:
    """All but one sequence dropped, a shared cell too; the dropped ones used again."""
    script = Script("keep").decode({0: tokens(8), 1: tokens(21, 1), 2: tokens(5, 2)}).keep(1).decode({1: [31]})
    script.decode({0: tokens(4, 3), 3: tokens(18, 4)}).cp(1, 2).keep(2).decode({2: [32]}).decode({1: tokens(3, 5)})
    return script.keep(3).decode({0: tokens(5, 6)})


def removal() -> Script:
    """Everything that can be asked of seq_rm, and use of what became free."""
    script = Script("removal").decode({0: tokens(30), 1: tokens(12, 1), 2: tokens(3, 2)})
    for p0, p1 in ((5, -1), (29, -1), (1, 10), (0, 30), (0, 29), (30, -1), (40, 50), (0, 0), (7, 7)):
        script.rm(0, p0, p1)
    script.at(0, 0).decode({0: tokens(6, 3)})
    script.rm(1).decode({1: tokens(20, 4)}).rm(1, 0, -1).rm(1).decode({2: [7]}).decode({1: tokens(4, 5), 0: [8]})
    script.rm(2, -1, 100).at(2, 0).decode({2: tokens(2, 6)}).clear(False).decode({3: tokens(19, 7), 0: [9]})
    return script.clear(True).decode({1: tokens(5, 8)}).rm(1).rm(0).rm(3).decode({2: tokens(18, 9)})


def shift() -> Script:
    """Positions moved and divided, then decoding at the new ones."""
    script = Script("shift").decode({0: tokens(20), 1: tokens(9, 1)})
    script.add(0, 0, -1, 6).add(1, 3, 5, 100).add(1, 4, 4, 9).add(1, 0, -1, 0).add(2, 0, -1, 5)
    script.decode({0: [5]}, shift={0: 6}).add(0, 0, -1, -3).decode({0: [6], 1: [7]}, shift={0: -3})
    # The last position is 24 now, its half 12.
    script.div(0, 0, -1, 2).div(1, 0, 3, 4).div(1, 0, -1, 1)
    return script.at(0, 13).decode({0: [8]}).at(0, 12).decode({0: [8]}).at(0, 11).decode({0: [9]})


def rejected() -> Script:
    """Batches that llama.cpp refuses: nothing may have changed."""
    script = Script("rejected batches").decode({0: tokens(10), 1: tokens(4, 1)})
    script.decode([((0,), 5, 9, True)]).decode([((0,), 5, 12, True)]).decode([((7,), 5, 0, True)])
    script.decode([((1,), N_VOCAB * 1000, 4, True)]).decode([((0,), 5, 10, False), ((0,), 5, 10, True)])
    return script.at(0, 11).decode({0: [5], 1: [6]})


def whole_state() -> Script:
    """The state of everything, saved and set in the same and in another context, with a shared cell."""
    script = Script("whole state").save("empty").decode({0: tokens(20), 2: tokens(7, 1)}).cp(0, 1).save("all")
    script.decode({0: [5], 1: [6], 2: [7]}).save("later").load("all")
    script.at(0, 20).at(1, 20).at(2, 7).decode({0: [5], 1: [6], 2: [7]}).save("again")
    script.new(1).load("later", context=1)
    for context in (0, 1):
        for seq, pos in ((0, 21), (1, 21), (2, 8)):
            script.at(seq, pos, context)
        script.decode({0: [8]}, context=context).decode({1: [9], 2: [10]}, context=context)
    return script.save("once more", context=1).load("empty").at(0, 0).decode({0: tokens(5, 2)})


def sequence_states(flags: int = 0) -> Script:
    """States of single sequences, set in the same, in another and in a fresh place."""
    kind = {0: "", PARTIAL: ", partial", ON_DEVICE: ", on the device"}[flags]
    script = Script(f"states of sequences{kind}").decode({0: tokens(20), 1: tokens(9, 1)})
    script.save("one", 1, flags).decode({1: [5], 0: [6]}).decode({0: [7]})
    if not flags & ON_DEVICE:  # a state on the device belongs to its sequence
        script.save("none", 3, flags).cp(0, 2).save("shared", 2, flags)
    if flags == 0:
        script.load("one", 3).at(3, 9).decode({3: [5]}).load("shared", 1).at(1, 22).decode({1: [8], 0: [9]})
        script.load("none", 0).at(0, 0).decode({0: tokens(4, 2)})
        script.new(1).load("shared", 2, context=1).at(2, 22, 1).decode({2: [8]}, context=1).save("x", 2, context=1)
    else:
        # Without the other half only the same sequence can take its state back, and only when that half agrees.
        script.load("one", 1, flags).save("after", 1, flags)
    return script


def embeddings() -> Script:
    """All outputs, with embeddings: llama.cpp then splits by sequence."""
    script = Script("embeddings", embeddings=True, pooling_type=0).decode(
        {0: tokens(20), 2: tokens(5, 1), 1: tokens(9, 2)}
    )
    return (
        script.decode({1: [5], 0: [6]})
        .decode({0: tokens(18, 3), 1: tokens(3, 4)}, interleave=True)
        .rm(1)
        .decode({1: [7], 2: [8]})
    )


def embedding_inputs() -> Script:
    """Rows of a table instead of tokens."""
    script = Script("embedding inputs").decode({0: tokens(20), 1: tokens(3, 1)}, embd=True).decode({0: [5]})
    return script.decode({1: [6], 0: [7]}, embd=True)


def shared_tokens(kv_unified: bool = False) -> Script:
    """Tokens of several sequences at once, then apart; then both in one batch.

    llama.cpp refuses all of it where it splits by consecutive ids: always, for a recurrent model.
    """
    script = Script(f"shared tokens{', unified' if kv_unified else ''}", kv_unified=kv_unified)
    script.decode([((0, 1, 2), t, i, i == 17) for i, t in enumerate(tokens(18))])
    for seq in range(3):
        script.at(seq, 18)
    script.decode({0: [5], 1: [6], 2: [7]}).decode({3: tokens(5, 1)})
    script.decode([((1, 3), 9, 40, True)])
    rows = [((0, 1), t, i, False) for i, t in enumerate(tokens(3, 2))] + [((0,), 5, 3, True), ((1,), 6, 3, True)]
    return script.clear().decode(rows).clear().decode({0: tokens(4, 3)})


def two_contexts() -> Script:
    """Two contexts, then three, freed in another order than made."""
    script = Script("two contexts").new(1, n_seq_max=2, n_ubatch=8)
    script.decode({0: tokens(20), 1: tokens(3, 1)}).decode({0: tokens(20), 1: tokens(11, 2)}, context=1)
    for i in range(3):
        script.decode({0: [5 + i]}).decode({1: [8 + i], 0: [9]}, context=1)
    script.new(2).decode({3: tokens(9, 3)}, context=2).free(0).decode({0: [4]}, context=1)
    script.new(0).decode({2: tokens(7, 4)}).free(2).decode({2: [3]}).free(1).decode({2: [2], 0: [1]})
    return script.free(0).new(0).decode({0: tokens(5, 5)})


def unified() -> Script:
    """One buffer for the attention of all sequences: hybrids then split without keeping ids consecutive."""
    script = Script("unified", kv_unified=True, n_ubatch=8).decode({0: tokens(5), 2: tokens(19, 1), 3: tokens(7, 2)})
    script.decode({0: [5], 2: [6]}).decode({3: [7], 0: [8], 2: [9]}).cp(2, 1).decode({1: [10], 3: [11]})
    return (
        script.decode({1: tokens(9, 3), 3: tokens(4, 4), 0: tokens(2, 5)}, interleave=True)
        .rm(2)
        .decode({2: tokens(3, 6)})
    )


def rollback() -> Script:
    """n_rs_seq > 0, which llama.cpp sets to 0 for some models: all steps back, beyond, pending twice, saved meanwhile.

    Not beyond the last batch, and no fork before the next one: llama.cpp says yes, and continues with a state
    of another position (test_llama_cases has ours).
    """
    script = Script("rollback", n_rs_seq=3).decode({0: tokens(20), 1: tokens(9, 1)})
    for back in (1, 2, 3, 4):
        p = script.pos(0)
        script.decode({0: tokens(5, back)}).rm(0, p + 5 - back, -1).rm(0, p + 4 - back, -1)
        script.save(f"state {back}", 0)
        # Where the removal is refused this batch is rejected, in both.
        script.at(0, p + 5 - back).decode({0: tokens(2, 9)}).decode({1: [9]})
        script.rm(0).at(0, 0).decode({0: tokens(6, 10 + back)})
        script.load(f"state {back}", 2).at(2, p + 5 - back).decode({2: [7]})
    p = script.pos(1)
    script.decode({1: tokens(4, 7)}).rm(1, p + 2, -1).at(1, p + 2).decode({1: [6]}).decode({0: [5], 1: [6]}).clear()
    return (
        script.decode({0: tokens(4, 8)})
        .rm(0, 2, -1)
        .at(0, 2)
        .decode({0: [3]})
        .cp(0, 3)
        .decode({0: [4]})
        .decode({3: [4]})
    )


def refused_context() -> Script:
    """More sequences than llama.cpp allows."""
    return Script("refused context", n_seq_max=257)


def random_walk(seed: int, n_seqs: int = 4, n_operations: int = 60, n_ubatch: int = 6) -> Script:
    """A seeded mix of all operations, with batches of any sequences in any order."""
    rng = random.Random(seed)
    script = Script(f"random walk {seed}", n_seq_max=n_seqs, n_ubatch=n_ubatch)
    saved: dict[str, int] = {}
    for i in range(n_operations):
        seqs = rng.sample(range(n_seqs), rng.randint(1, n_seqs))
        one, other = rng.randrange(n_seqs), rng.randrange(n_seqs)
        kind = rng.choices(("decode", "one", "rm", "cp", "keep", "add", "save", "load"), (8, 8, 3, 3, 0.5, 1, 1, 1.5))[
            0
        ]
        if max(script.pos(s) for s in range(n_seqs)) > 150:
            script.clear(rng.random() < 0.5)
        if kind == "decode":
            outputs = rng.choice(("last", "all"))
            script.decode(
                {s: tokens(rng.randint(1, 12), i * 100 + s) for s in seqs},
                interleave=rng.random() < 0.3,
                outputs=outputs,
            )
        elif kind == "one":
            script.decode({s: [rng.randrange(1, N_VOCAB)] for s in seqs})
        elif kind == "rm":
            script.rm(one) if rng.random() < 0.7 else script.rm(one, script.pos(one), -1)
        elif kind == "cp":
            script.cp(one, other)
        elif kind == "keep":
            script.keep(one)
        elif kind == "add":
            script.rm(one, 1, 1).add(one, 0, 0, 3)
        elif kind == "save":
            saved[f"s{i}"] = script.pos(one)
            script.save(f"s{i}", one)
        elif saved:
            name = rng.choice(sorted(saved))
            script.load(name, other).at(other, saved[name])
    return script


def many_sequences(n: int = 256) -> Script:
    """As many sequences as llama.cpp allows: all, few, one, in any order; forked, removed, one by one."""
    rng = random.Random(0)
    script = Script(f"{n} sequences", n_seq_max=n, n_ubatch=64, n_ctx=256 * n, n_batch=512)
    script.decode({s: [1 + s % 100] for s in range(n)}).decode({s: [7] for s in range(0, n, 3)})
    for i in range(4):
        script.decode({s: [i + 9] for s in rng.sample(range(n), 32)})
    for i in range(3):
        script.decode({rng.randrange(n): tokens(5, i)})
    script.rm(n - 1).rm(0).cp(17, 0).decode({0: [5], 17: [6]}).decode({n - 1: tokens(3, 9), 100: [3]}).save("all")
    return (
        script.keep(9).decode({9: [4], 200: [4]}).load("all").at(30, script.pos(30)).rm(30).decode({30: tokens(70, 1)})
    )


def parity_scripts(*, shifts: bool = True, random_walks: Sequence[int] = (1, 2, 3)) -> list[Script]:
    """All scripts for one model, except that with many sequences. `shifts`: may positions be moved?"""
    return [
        prefill_and_decode(),
        four_lengths(),
        two_threads(),
        interleaved(),
        fork(),
        keep(),
        removal(),
        *([shift()] if shifts else []),
        rejected(),
        whole_state(),
        *(sequence_states(flags) for flags in (0, PARTIAL, ON_DEVICE)),
        embeddings(),
        embedding_inputs(),
        shared_tokens(),
        shared_tokens(kv_unified=True),
        two_contexts(),
        unified(),
        rollback(),
        refused_context(),
        *(random_walk(seed) for seed in random_walks),
    ]
