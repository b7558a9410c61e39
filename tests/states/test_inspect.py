"""Proves what ``rcache inspect`` tells of real files and of damaged ones, and where it says that it can't tell."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path

import pytest
from children import rcache
from exchange import MODELS, PURE, SIDES, Exchanges
from llama_models import models
from state_tools import SPEC, SPEC_P, used_cache, written

from rcache_plugin.errors import InvalidArgument
from rcache_plugin.states import inspect as state_inspect
from rcache_plugin.states.inspect import Report, inspect

PROMPTS = {0: 20, 1: 9, 2: 1, 3: 9}
LAYERS = {"mamba": (3, 3), "rwkv7": (2, 2), "granite-hybrid": (3, 2), "qwen35": (4, 2)}  # of the model, with a state
ATTENTION_LAYERS = {"granite-hybrid": 1, "qwen35": 2}


def spans(report: Report, part: str) -> dict[int | None, tuple[int, int, int]]:
    return {row.seq_id: (row.n_cells, row.pos_min, row.pos_max) for row in report.sequences() if row.part == part}


def check_parts(report: Report, model: str, seqs: list[int]) -> None:
    assert report.intact is True and report.problems == []
    hybrid = model not in PURE
    assert [part.kind for part in report.parts] == ["attention"] * hybrid + ["recurrent"]
    recurrent = report.parts[-1]
    n_layer, n_states = LAYERS[model]
    assert recurrent.n_layer == n_layer
    assert [column.which for column in recurrent.columns] == ["r"] * n_states + ["s"] * n_states
    assert {column.type for column in recurrent.columns} == {"f32"}
    named = seqs if len(seqs) > 1 or report.seq_id is not None else [None]
    assert spans(report, "recurrent") == {
        name: (1, PROMPTS[seq] - 1, PROMPTS[seq] - 1) for name, seq in zip(named, seqs, strict=True)
    }
    if hybrid:
        attention = report.parts[0]
        assert attention.n_layer == ATTENTION_LAYERS[model] and attention.n_streams == 4
        assert [column.which for column in attention.columns] == ["k"] * attention.n_layer + ["v"] * attention.n_layer
        assert {column.type for column in attention.columns} == {"f16"}
        assert spans(report, "attention") == {seq: (PROMPTS[seq], 0, PROMPTS[seq] - 1) for seq in seqs}


@pytest.mark.parametrize("writer", SIDES)
@pytest.mark.parametrize("model", MODELS)
def test_files_of_llama_cpp(exchanges: Exchanges, model: str, writer: str) -> None:
    folder = exchanges.files(model, writer)
    session = inspect(folder / f"{writer}.session file")
    assert (session.kind, session.version, session.checksum) == ("llama session", 10, False)
    assert session.architecture == models()[model].architecture and len(session.tokens["prompt"]) == 20
    check_parts(session, model, [0, 1, 2, 3])
    sequence = inspect(folder / f"{writer}.sequence file")
    assert (sequence.kind, sequence.version, sequence.seq_id) == ("llama sequence", 3, None)
    assert len(sequence.tokens["prompt"]) == 9 and sequence.single
    check_parts(sequence, model, [1])
    data = inspect(folder / f"{writer}.seq data")
    assert (data.kind, data.version, data.seq_id) == ("llama sequence data", None, 0)
    check_parts(data, model, [0])
    partial = inspect(folder / f"{writer}.seq data partial")
    assert [part.kind for part in partial.parts] == ["recurrent"] and partial.intact


@pytest.mark.parametrize("model", MODELS)
def test_files_of_llama_cpp_that_were_cut(exchanges: Exchanges, model: str) -> None:
    """Never said to be intact, at whatever length."""
    folder = exchanges.files(model)
    for kind in ("session file", "sequence file"):
        data = (folder / f"stock.{kind}").read_bytes()
        path = folder / "cut"
        ends = {0, 3, 4, 11, 12, 90, 93, 100, *range(len(data) - 40, len(data), 3)}
        ends |= set(range(0, len(data), max(211, len(data) // 150)))
        ends |= set(boundaries(data, folder / f"stock.{kind}"))
        for end in sorted(ends - {len(data)}):
            path.write_bytes(data[:end])
            try:
                assert not inspect(path).intact, end
            except InvalidArgument:
                assert end < 4
        path.write_bytes(data + b"\0")
        assert inspect(path).intact is False


def boundaries(data: bytes, path: Path) -> list[int]:
    """Where a part or a tensor ends, from the end."""
    at, ends = len(data), []
    for part in reversed(inspect(path).parts):
        for column in reversed(part.columns if part.kind == "recurrent" else []):
            at -= 12 + column.row_bytes * len(part.cells)
            ends.append(at)
        at = len(data) - sum(p.n_bytes for p in inspect(path).parts[inspect(path).parts.index(part) :])
        ends.append(at)
    return ends


@pytest.mark.parametrize("spec", [SPEC, SPEC_P], ids=["plain", "p"])
def test_files_of_ours(tmp_path: Path, spec) -> None:
    with used_cache(spec) as cache:
        cache.save(tmp_path / "all", tokens={3: [4, 5]})
        cache.save(tmp_path / "one", 0)
    whole, one = inspect(tmp_path / "all"), inspect(tmp_path / "one")
    assert (whole.kind, whole.version, whole.intact, whole.checksum) == ("rcache", 1, True, True)
    assert spans(whole, "recurrent") == {0: (1, 7, 7), 1: (1, 9, 9), 3: (1, 9, 9)}
    assert [row.n_tokens for row in whole.sequences()] == [None, None, 2]
    assert one.seq_id == 0 and one.single and spans(one, "recurrent") == {0: (1, 7, 7)}
    assert whole.fingerprint == one.fingerprint
    data = (tmp_path / "all").read_bytes()
    for i in range(0, len(data), 3):
        (tmp_path / "bad").write_bytes(data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :])
        if i >= 7:
            bad = inspect(tmp_path / "bad")
            assert bad.intact is False and bad.problems
        (tmp_path / "bad").write_bytes(data[: min(i + 7, len(data) - 1)])
        assert inspect(tmp_path / "bad").intact is False


def test_a_p_in_a_file_of_llama_cpp(tmp_path: Path) -> None:
    with used_cache(SPEC_P) as cache:
        state = written(cache)
    (tmp_path / "x").write_bytes(struct.pack("<III", 0x6767736E, 10, 0) + struct.pack("<I", 2) + b"ab" + state)
    report = inspect(tmp_path / "x")
    assert [column.which for column in report.parts[0].columns] == ["r", "r", "p", "s", "s"] and report.intact


def test_what_can_not_be_told_is_said(
    exchanges: Exchanges, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = (exchanges.files("qwen35") / "stock.session file").read_bytes()
    path, part = tmp_path / "x", inspect(exchanges.files("qwen35") / "stock.session file").parts[0]
    path.write_bytes(data[:4] + struct.pack("<I", 9) + data[8:])
    other = inspect(path)
    assert other.intact is None and other.parts == [] and "only version 10 is known" in other.problems[0]
    path.write_bytes(data[: 12 + 80 + 4 + len("qwen35") + part.n_bytes])
    cut = inspect(path)
    assert cut.intact is None and [p.kind for p in cut.parts] == ["attention"] and "was cut behind" in cut.problems[0]
    alike = struct.pack("<IiIII", 1, 7, 0, 0, 3) + 2 * (struct.pack("<iQ", 0, 4) + b"rrrr")
    path.write_bytes(struct.pack("<Ii", 0xAF143CD8, 0) + alike)
    doubtful = inspect(path)
    assert doubtful.intact is None and "look the same" in doubtful.problems[0]
    monkeypatch.setattr(state_inspect, "parses", lambda *_: [[part], [part, part]])
    several = inspect(exchanges.files("qwen35") / "stock.session file")
    assert several.intact is None and several.parts == [] and "2 parses" in several.problems[0]


def test_numbers_that_cannot_be(tmp_path: Path) -> None:
    path = tmp_path / "x"
    for data, words in (
        (struct.pack("<III", 0x6767736E, 10, 1 << 31), "too short for 2147483648 tokens"),
        (struct.pack("<IIII", 0x6767736E, 10, 0, 1 << 31), "architecture"),
        (struct.pack("<IIIIII", 0x67677371, 3, 0, 0xFFFFFFFF, 0, 0), "can't be read"),
        (struct.pack("<I", 0xAF143CD8), "length"),
        (struct.pack("<II", 0x67677371, 3), "length"),
        (struct.pack("<III", 0x67677371, 3, 0) + bytes(1 << 16), "can't be read|parses"),
        (struct.pack("<IIII", 0x67677371, 3, 0, 1) + bytes(1 << 20), "can't be read|parses"),
    ):
        path.write_bytes(data)
        report = inspect(path)
        assert not report.intact
        assert re.search(words, report.problems[0]), report.problems
    for data in (b"", b"GGUF", b"RCACHE!"):
        path.write_bytes(data)
        with pytest.raises(InvalidArgument, match="neither"):
            inspect(path)


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command_shows_tables(exchanges: Exchanges, tmp_path: Path) -> None:
    done = rcache("inspect", str(exchanges.files("qwen35") / "stock.session file"))
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in done.stdout.splitlines() if "│" in line]
    assert ["0", "attention", "20", "0 .. 19", ""] in rows and ["3", "recurrent", "1", "8", ""] in rows
    assert ["recurrent", "2 x s", "f32", "65536", "393216"] in rows
    assert "intact       yes, it reads to the last byte; the format has no checksum" in done.stdout
    assert "model        qwen35\n" in done.stdout and "tokens       20: " in done.stdout
    with used_cache() as cache:
        cache.save(tmp_path / "x", 3, [7, 8])
    done = rcache("inspect", str(tmp_path / "x"))
    assert "its checksum is right" in done.stdout and "tokens of 3  2: 7 8\n" in done.stdout
    data = (tmp_path / "x").read_bytes()
    (tmp_path / "x").write_bytes(data[:-40] + b"\0" + data[-39:])
    done = rcache("inspect", str(tmp_path / "x"), expect=1)
    assert "intact       NO" in done.stdout and "problem      sha256: the file tells of" in done.stdout


def test_the_command_prints_json(exchanges: Exchanges, tmp_path: Path) -> None:
    done = rcache("inspect", "--json", str(exchanges.files("granite-hybrid", "rcache") / "rcache.sequence file"))
    found = json.loads(done.stdout)
    assert found["kind"] == "llama sequence" and found["intact"] is True and len(found["tokens"]["prompt"]) == 9
    assert found["parts"][0]["cells"] == 9 and found["parts"][1]["cells"] == [{"pos": 8, "seq_ids": []}]
    assert found["parts"][1]["columns"][0] == {"which": "r", "type": "f32", "row_bytes": 7680}
    assert found["sequences"][1]["pos_max"] == 8
    (tmp_path / "none").write_bytes(b"something else")
    assert "neither a state file" in rcache("inspect", str(tmp_path / "none"), expect=2).stderr
    assert "No such file" in rcache("inspect", str(tmp_path / "missing"), expect=2).stderr
