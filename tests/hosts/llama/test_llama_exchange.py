"""Proves that stock llama.cpp and ours read each other's states: every pair, every way to write, several models."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import children
import llama_child
import llama_models
import pytest
from exchange import MODELS, PURE, SIDES, Exchanges
from exchange_child import KINDS

PAGE = children.ROOT / "docs" / "states.md"


POSITIONS = {
    "data": [19, 8, 0, 8],
    "session file": [19, 8, 0, 8],
    "seq data": [19, -1, -1, -1],
    "seq data partial": [19, 8, 0, 8],
    "sequence file": [-1, 8, -1, -1],
    "python": [19, -1, -1, -1],
    "own": [19, 8, 0, 8],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reader", SIDES)
@pytest.mark.parametrize("writer", SIDES)
@pytest.mark.parametrize("model", MODELS)
def test_exchange(exchanges: Exchanges, model: str, writer: str, reader: str, kind: str) -> None:
    assert exchanges.of(model)[reader][f"{writer} {kind}"] == {
        "taken": True,
        "positions": POSITIONS[kind],
        "same bytes when saved again": True,
        "same logits": True,
    }


@pytest.mark.parametrize("kind", [*KINDS, "device 2", "device 3"])
@pytest.mark.parametrize("model", MODELS)
def test_the_same_content_gives_the_same_bytes(exchanges: Exchanges, model: str, kind: str) -> None:
    stock, ours = ((exchanges.files(model) / f"{side}.{kind}").read_bytes() for side in SIDES)
    assert stock == ours and len(stock) > 8


@pytest.mark.parametrize("kind", ["stock python", "rcache python", "rcache own"])
@pytest.mark.parametrize("model", PURE)
def test_exchange_with_the_cache_in_python(exchanges: Exchanges, model: str, kind: str) -> None:
    found = exchanges.of(model)["rcache"][kind]
    assert found == {
        "taken": True,
        "positions": POSITIONS[kind.split()[1]],
        "same bytes when saved again": True,
        "same logits": True,
    }


@pytest.mark.parametrize("model", PURE)
def test_a_file_of_ours_has_the_bytes_of_llama_cpp(exchanges: Exchanges, model: str) -> None:
    folder = exchanges.files(model)
    whole, session = (folder / "rcache.own whole").read_bytes(), (folder / "stock.data").read_bytes()
    name = session[4 : 4 + int.from_bytes(session[:4], "little")]
    assert llama_models.models()[model].architecture.encode() == name
    assert whole[:-32].endswith(session[4 + len(name) :])


@pytest.mark.parametrize("model", MODELS)
def test_contexts_for_more_or_fewer_sequences(exchanges: Exchanges, model: str) -> None:
    """A state goes where it fits; in hybrids llama.cpp wants the same number of streams of the attention."""
    stock, ours = (exchanges.of(model)[side]["sizes"] for side in SIDES)
    assert ours == stock
    for n in (1, 2, 8):
        for mode in ("", ", unified"):
            fits = model in PURE or mode != ""
            one, whole = ours[f"seq data, {n}{mode}"], ours[f"data, {n}{mode}"]
            assert (one[0] > 0, one[1]) == (fits, [19 if fits else -1] + [-1] * (n - 1))
            fits = fits and n == 8
            assert (whole[0] > 0, whole[1][:4]) == (fits, [19, 8, 0, 8] if fits else [-1] * min(n, 4))


ROWS = {
    tuple(row[:3]): row[3].split(" | ")
    for row in re.findall(r"^\| (\S+) \| (\S+) \| (\S+) \| (.+) \|$", PAGE.read_text(), re.M)
    if row[0] in MODELS
}


def test_the_rows_in_the_documentation() -> None:
    assert ROWS.keys() == {(model, writer, reader) for model in MODELS for writer in SIDES for reader in SIDES}


@pytest.mark.parametrize("row", ROWS, ids=" ".join)
def test_the_table_in_the_documentation(exchanges: Exchanges, row: tuple[str, str, str]) -> None:
    model, writer, reader = row
    done = exchanges.of(model)[reader]
    found = [all(done[f"{writer} {kind}"][what] for what in ("taken", "same logits")) for kind in KINDS]
    assert ROWS[row] == ["yes" if each else "no" for each in found]


# --- on the device ---------------------------------------------------------------------------------------------------

ON_DEVICE = """
    import sys
    from pathlib import Path
    import llama_child
    from llama_child import ON_DEVICE, Machine
    from llama_scripts import tokens
    if MODE == "rcache":
        llama_child.install()
    machine = Machine(Path(MODEL))
    rows = [((s,), t, i, False) for s in range(4) for i, t in enumerate(tokens(5 + s, s))]

    def expected(context):
        return {s: machine.decode([((s,), 7, 5 + s, True)], context)[1].tobytes() for s in (0, 2, 3)}

    for context in (0, 1):
        machine.new(context)
        assert machine.decode(rows, context)[0] == 0
        machine.lib.llama_memory_seq_rm(machine.memory(context), 1, -1, -1)  # cells 0, 2 and 3: two ranges
    want = expected(1)
    state = machine.save(0, -1, ON_DEVICE)
    print("saved", len(state), flush=True)
    assert machine.decode([((s,), 9, 5 + s, False) for s in (0, 2, 3)])[0] == 0
    assert machine.decode([((1,), t, i, False) for i, t in enumerate(tokens(9))])[0] == 0
    before = machine.positions(0)
    damaged = state[:-20] + bytes([state[-20] ^ 1]) + state[-19:]
    if HYBRID is False:
        assert machine.load(damaged, 0, -1, ON_DEVICE) == 0 and machine.positions(0) == before
    assert machine.load(state, 0, -1, ON_DEVICE) == len(state)
    assert [high for _, high in machine.positions(0)] == [4, -1, 6, 7]
    assert expected(0) == want
    machine.close()
    print("done")
"""


def on_device(tmp_path: Path, model: str, mode: str) -> str:
    path = llama_models.write(model, tmp_path)
    head = f"MODEL, MODE, HYBRID = {str(path)!r}, {mode!r}, {model not in PURE}\n"
    return children.run_code(head + textwrap.dedent(ON_DEVICE), env=llama_child.QUIET)


@pytest.mark.parametrize("model", MODELS)
def test_all_sequences_on_the_device_in_several_ranges_of_cells(tmp_path: Path, model: str) -> None:
    assert on_device(tmp_path, model, "rcache").endswith("done\n")


def test_stock_aborts_there(tmp_path: Path) -> None:
    with pytest.raises(children.ChildFailed, match="multiple ranges of cells"):
        on_device(tmp_path, "mamba", "stock")
