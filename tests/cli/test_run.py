"""Proves that ``rcache run`` prints the text and figures that it promises, and ends well however it is ended."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest
from children import RCACHE, finish, rcache, start
from cli_kit import PROMPT, RUN, parts, tables

# --- generating ---


def test_one_sequence_streams_prompt_and_text_and_ends_with_figures() -> None:
    done = rcache(*RUN, PROMPT, "-n", "8", "--temp", "0")
    assert done.stdout.startswith(PROMPT)
    assert len(done.stdout) > len(PROMPT) + 2
    assert done.stdout.endswith("\n")
    assert re.search(r"^prefill: [1-9]\d* tokens, [\d.]+ tokens/s$", done.stderr, re.M)
    assert re.search(r"^decode: +7 tokens, [\d.]+ tokens/s$", done.stderr, re.M)  # the eighth needs no decode


def test_the_seed_decides_the_text() -> None:
    texts = [rcache(*RUN, PROMPT, "-n", "12", "--temp", "1.5", "--seed", s).stdout for s in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]


def test_small_ubatches_and_placement_change_no_greedy_text() -> None:
    long_prompt = "And God said, Let there be light: and there was light. " * 3
    args = (*RUN, long_prompt, "-n", "8", "--temp", "0")
    texts = {
        rcache(*args, *more).stdout for more in ((), ("--ubatch", "5"), ("--placement", "compact"), ("--seqs", "1"))
    }
    assert len(texts) == 1


def test_prompt_from_stdin() -> None:
    args = ("-n", "4", "--temp", "0")
    assert rcache(*RUN, "-", *args, stdin=PROMPT + "\n").stdout == rcache(*RUN, PROMPT, *args).stdout


def test_no_tokens_asked_for_reads_the_prompt_only() -> None:
    done = rcache(*RUN, PROMPT, "-n", "0")
    assert done.stdout == PROMPT + "\n"
    assert "decode:  0 tokens, - tokens/s" in done.stderr


def test_four_sequences_show_their_cells_positions_and_sources() -> None:
    done = rcache(*RUN, PROMPT, "-n", "4", "--seqs", "4", "--cells", "--temp", "1")
    shown = tables(done.stdout)
    assert [title.split(":")[0] for title, _ in shown] == ["prompt", "fork", "step 1", "step 2", "step 3"]
    prompt, fork, *steps = (rows for _, rows in shown)
    (shared,) = [row for row in prompt if row["sequences"] == "0"]
    assert shared["read from"] == shared["cell"]  # a new sequence reads the row that was zeroed for it
    assert "rs_z" in shared["marks"]
    n_prompt = int(shared["pos"]) + 1
    assert [row["sequences"] for row in fork if row["cell"] == shared["cell"]] == ["0 1 2 3"]
    assert sum(row["sequences"] != "-" for row in fork) == 1
    for i, rows in enumerate(steps):
        assert sorted(row["sequences"] for row in rows) == ["0", "1", "2", "3"]
        assert {row["pos"] for row in rows} == {str(n_prompt + i)}
        sources = [row["read from"] for row in rows]
        assert sources == ([shared["cell"]] * 4 if i == 0 else [row["cell"] for row in rows])
        assert [row["cell"] for row in rows if "head" in row["marks"]] == ["0"]
        assert [row["cell"] for row in rows if "n" in row["marks"].split()] == ["3"]


def test_sequences_are_printed_with_their_labels_and_differ() -> None:
    done = rcache(*RUN, PROMPT, "-n", "12", "--seqs", "3", "--temp", "1.5", "--seed", "7")
    labels, texts = parts(done.stdout)
    assert labels == ["sequence 0 (seed 7)", "sequence 1 (seed 8)", "sequence 2 (seed 9)"]
    assert len(set(texts)) == 3
    assert all(text.startswith(PROMPT) for text in texts)
    assert re.search(r"^decode: +\d+ tokens, [\d.]+ tokens/s in 3 sequences$", done.stderr, re.M)


def test_greedy_sequences_are_equal_and_a_note_says_so() -> None:
    done = rcache(*RUN, PROMPT, "-n", "6", "--seqs", "2", "--temp", "0")
    assert len(set(parts(done.stdout)[1])) == 1
    assert "with --temp 0 all sequences are the same" in done.stderr


# --- ends that a user brings about ---


@pytest.mark.parametrize("more", [(), ("--seqs", "3")])
def test_ctrl_c_leaves_text_and_figures(more: tuple[str, ...]) -> None:
    # The child tells when it has begun to decode, as several sequences print only at the end, and never ends a text.
    code = """
    import sys
    from rcache_plugin.cli.main import main
    from rcache_plugin.cli.run.session import Session
    from rcache_plugin.hosts.mamba.tokenizer import Tokenizer
    step, begun = Session._step, []
    def noted(session, going):
        logits = step(session, going)
        if len(begun) == 2:
            print("begun", file=sys.stderr, flush=True)
        begun.append(1)
        return logits
    Session._step = noted
    Tokenizer.stop_ids = property(lambda tokenizer: frozenset())
    sys.exit(main(sys.argv[1:]))
    """
    lines = "\n".join(line[4:] for line in code.splitlines())
    command = [sys.executable, "-c", lines, *RUN, PROMPT, "-n", "1000000", "--temp", "1", *more]
    with start(command) as child:
        assert child.stderr is not None
        before = ""
        while "begun" not in before:
            line = child.stderr.readline()
            assert line, f"ended early:\n{before}"
            before += line
        child.send_signal(signal.SIGINT)
        status, out, err = finish(child)
    assert status == 130, err
    assert "Traceback" not in before + err
    assert out.lstrip("\n").startswith("--- sequence 0" if more else PROMPT)
    assert len(out) > len(PROMPT) + 3
    assert re.search(r"^decode: +[1-9]\d* tokens, [\d.]+ tokens/s", err, re.M)


def test_a_closed_pipe_ends_it_quietly() -> None:
    with start([*RCACHE, *RUN, PROMPT, "-n", "1000000", "--temp", "1.5"]) as child:
        assert child.stdout is not None
        assert child.stdout.read(len(PROMPT)) == PROMPT
        child.stdout.close()
        child.stdout = None
        status, _, err = finish(child)
    assert (status, err) == (141, "")


# --- errors, progress ---


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "No such file"), (b"", "GGUF"), (b"GGUF\3\0\0\0", "truncated")],
)
def test_a_file_that_is_no_model_is_one_line(tmp_path: Path, content: bytes | None, says: str) -> None:
    path = tmp_path / "model.gguf"
    if content is not None:
        path.write_bytes(content)
    done = rcache(*RUN, "x", "-m", str(path), expect=2)
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("rcache: error: ")
    assert "model.gguf" in line
    assert says.lower() in line.lower()


def test_progress_bars_show_on_a_terminal_only() -> None:
    read, write = os.openpty()
    command = [*RCACHE, *RUN, PROMPT, "-n", "2"]
    try:
        with start(command, stderr=write, env={"TERM": "xterm"}) as child:
            os.close(write)
            shown = b""
            try:
                while piece := os.read(read, 4096):
                    shown += piece
            except OSError:  # EIO: the child has closed its end
                pass
            assert finish(child)[0] == 0
    finally:
        os.close(read)
    assert "loading" in shown.decode()
    assert "reading the prompt" in shown.decode()
    assert "loading" not in rcache(*command[3:]).stderr
