"""Proves that classic placement equals llama.cpp's own class: after the same operations all fields are equal.

The class runs in a process where nothing replaces it; a test-only accessor reads its fields. RCACHE_ORACLE_EXAMPLES is
the number of operation sequences.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import llama_models
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from llama_oracle import OracleProcess, compile_oracle

from rcache_plugin.cells.slots import commit, plan_slots
from rcache_plugin.cells.table import CellTable
from rcache_plugin.cells.ubatch import UBatch

EXAMPLES = int(os.environ.get("RCACHE_ORACLE_EXAMPLES", "500"))
SIZES = (1, 2, 3, 5, 8)


# The head is far behind few used cells, so the search starts anew at cell 0; one less, and it does not.
FAR_HEAD: list[list[Any]] = [
    ["find_slot", [[i] for i in range(16)], 1, [0] * 16],
    *(["seq_rm", i, -1, -1] for i in range(15) if i not in (9, 10)),
    ["find_slot", [[15]], 1, [1]],
    ["seq_rm", 9, -1, -1],
    ["find_slot", [[15]], 1, [2]],
    ["find_slot", [[3]], 1, [0]],
    ["seq_keep", 10],
    ["find_slot", [[3], [4], [5]], 1, [0, 0, 0]],
    ["find_slot", [[4]], 1, [1]],
    ["seq_rm", 3, -1, -1],
    ["find_slot", [[5]], 1, [1]],
    ["find_slot", [[6]], 1, [0]],
    ["find_slot", [[10]], 1, [1]],
    ["seq_rm", 4, -1, -1],
    ["find_slot", [[10]], 1, [2]],
    ["find_slot", [[7]], 1, [0]],
    ["find_slot", [[10]], 1, [3]],
    ["find_slot", [[8], [9]], 1, [0, 0]],
]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OracleProcess]:
    folder = tmp_path_factory.mktemp("oracle")
    process = OracleProcess(compile_oracle(folder), llama_models.write("mamba", folder), folder / "stderr.txt")
    yield process
    process.close()


@st.composite
def sequences_of_operations(draw: st.DrawFn) -> tuple[int, list[list[Any]]]:
    n = draw(st.sampled_from(SIZES))
    seq_id = st.integers(0, n - 1)
    last = dict.fromkeys(range(n), -1)  # positions as they should be, to draw mostly consecutive ones
    ops: list[list[Any]] = []
    for _ in range(draw(st.integers(1, 24))):
        name = draw(st.sampled_from(["find_slot"] * 8 + ["seq_rm"] * 3 + ["seq_cp"] * 2 + ["seq_keep", "seq_add",
                                                                                       "seq_div", "clear"]))
        if name == "find_slot":
            ids = draw(st.permutations(range(n)))[: draw(st.integers(1, n))]
            sets: list[list[int]] = []
            for i in ids:
                if sets and draw(st.integers(0, 5)) == 0:
                    sets[-1].append(i)
                else:
                    sets.append([i])
            n_seq_tokens = draw(st.integers(1, 3))
            gap = draw(st.sampled_from([0] * 6 + [1, 5]))
            pos = [last[s[0]] + 1 + gap + j for s in sets for j in range(n_seq_tokens)]
            for s in sets:
                last.update(dict.fromkeys(s, last[s[0]] + gap + n_seq_tokens))
            ops.append([name, sets, n_seq_tokens, pos])
        elif name == "seq_rm":
            s = draw(seq_id)
            p0, p1 = draw(st.sampled_from([(-1, -1), (0, -1), (last[s] + 1, -1), (last[s], -1), (0, last[s] + 1),
                                           (0, last[s]), (1, 2), (3, 2)]))
            ops.append([name, s, p0, p1])
            if p0 <= 0 and (p1 < 0 or p1 > last[s]):
                last[s] = -1
        elif name == "seq_cp":
            src, dst = draw(seq_id), draw(seq_id)
            ops.append([name, src, dst, -1, -1])
            last[dst] = last[src]
        elif name == "seq_keep":
            s = draw(seq_id)
            ops.append([name, s])
            last = {i: last[i] if i == s else -1 for i in last}
        elif name == "seq_add":
            ops.append([name, draw(seq_id), 0, -1, draw(st.integers(0, 4))])
        elif name == "seq_div":
            ops.append([name, draw(seq_id), 0, -1, draw(st.integers(1, 3))])
        else:
            ops.append([name])
            last = dict.fromkeys(last, -1)
    return n, ops


def run(table: CellTable, op: list[Any]) -> tuple[Any, Any]:
    """(result, plan of a find_slot) on our table, with what the adapter adds to it."""
    name, *args = op
    if name == "find_slot":
        sets, _, pos = args
        plans = plan_slots(table, (UBatch(sets, pos),))
        if plans is None:
            return False, None
        commit(table, plans[0])
        return True, plans[0]
    if name == "seq_rm":
        seq_id, _, p1 = args
        if 0 <= p1 <= table.seq_pos_max(seq_id):  # llama.cpp need not forget what lies before the last position
            return True, None
    return getattr(table, name)(*args), None


def check_equal(table: CellTable, plan: Any, stepped: bool, theirs: dict[str, Any]) -> None:
    cells = [list(table.cell(i)[:3]) for i in range(table.size)]
    assert [[pos, src, ids] for pos, src, _, _, ids in theirs["cells"]] == [[p, s, list(ids)] for p, s, ids in cells]
    assert [cell[3] for cell in theirs["cells"]] == [table.tail(s) for s in range(table.n_seq_max)]
    assert (theirs["head"], theirs["used"]) == (table.head, table.used)
    if stepped:  # the class keeps n and rs_z of before a clear
        assert (theirs["n"], theirs["rs_z"]) == (table.n, table.rs_z)
    if plan is not None:
        window = theirs["cells"][plan.head : plan.head + plan.n]
        assert [cell[2] for cell in window] == plan.s_copy.tolist()


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow,
                                                                     HealthCheck.function_scoped_fixture])
@given(job=sequences_of_operations())
@example(job=(16, FAR_HEAD))
def test_equal_to_the_class(oracle: OracleProcess, job: tuple[int, list[list[Any]]]) -> None:
    size, ops = job
    table = CellTable(size)
    stepped = False
    for op, (result, fields) in zip(ops, oracle.ask({"n_seq_max": size, "ops": ops}), strict=True):
        ours, plan = run(table, op)
        table.check()
        assert result == ours, op
        stepped = stepped or plan is not None
        check_equal(table, plan, stepped, fields)
