"""Proves `hosts.llama` in use: `Llama`, options, a model without states, agreement with the reference host."""

from __future__ import annotations

import json
from pathlib import Path

import agreement
import children
import llama_child
import llama_models
import numpy as np
import pytest
from llama_models import Fields, Shapes


def _attention_only() -> tuple[Fields, Shapes]:
    d, n_ff, n_head = 256, 512, 4
    fields = llama_models._common(d, 2, n_ff, n_head, n_head) | {"rope.dimension_count": d // n_head}
    shapes = llama_models._ends(d)
    for il in range(2):
        layer = {"attn_norm.weight": (d,), **llama_models._attention(d, d // n_head, n_head, n_head)}
        shapes |= llama_models._layer(il, {**layer, **llama_models._ffn(d, n_ff)})
    return fields, shapes


def run(code: str, *, stock: bool = False, **names: object) -> str:
    head = "".join(f"    {name} = {value!r}\n" for name, value in names.items())
    return children.run_code(head + code, env=llama_child.QUIET, timeout=120, stock=stock)


def test_our_llama_is_a_drop_in(tmp_path: Path) -> None:
    out = run(
        """
    from rcache_plugin.hosts.llama import Llama, caches, context_options, installed
    import llama_cpp
    assert installed() and issubclass(Llama, llama_cpp.Llama)
    llm = Llama(MODEL, n_ctx=128, n_threads=1, verbose=False, placement="classic", spare_cells=2)
    cache = llm.rcache
    assert cache.placement == "classic" and cache.table.n_seq_max == 1
    assert cache.table.size - cache.checkpoints.n_cells == 3
    assert cache in caches()
    text = llm("Once upon a time", max_tokens=8, temperature=0)["choices"][0]["text"]
    assert cache.seq_pos_max(0) == llm.n_tokens - 1 > 0
    with context_options(placement="classic") as made:
        other = llama_cpp.Llama(MODEL, n_ctx=128, n_threads=1, verbose=False)
    assert made == [made[0]] and made[0].placement == "classic"
    assert made[0].table.size == 1 + made[0].checkpoints.n_cells
    plain = Llama(MODEL, n_ctx=128, n_threads=1, verbose=False)
    assert plain.rcache.placement == "compact"
    assert plain("Once upon a time", max_tokens=8, temperature=0)["choices"][0]["text"] == text
    assert len(caches()) == 3
    for each in (llm, other, plain):
        each.close()
    assert caches() == () and cache.closed
    print("ok")
    """,
        MODEL=str(llama_models.write("mamba", tmp_path)),
    )
    assert out.split() == ["ok"]


def test_the_cause_of_a_failed_decode_is_told(tmp_path: Path) -> None:
    out = run(
        """
    import logging, sys
    from rcache_plugin.hosts.llama import Llama
    llm = Llama(MODEL, n_ctx=64, n_threads=1, verbose=False)
    find_slot, seq_rm = llm.rcache.find_slot, llm.rcache.seq_rm

    class Mine(Exception):
        pass

    def broken(*args):
        raise kind("on purpose")

    for kind in (Mine, KeyboardInterrupt):
        llm.reset()
        llm.rcache.find_slot = broken
        try:
            llm.eval([1, 2, 3])
        except RuntimeError as error:
            print(type(error.__cause__).__name__, error.__cause__)
        except KeyboardInterrupt as error:
            print("interrupted", error.__cause__)
        llm.rcache.find_slot = find_slot
        llm.reset()
        llm.eval([1, 2, 3])
    llm.reset()
    kind, llm.rcache.seq_rm = Mine, broken
    logging.basicConfig(stream=sys.stdout, format="logged: %(message)s")
    llm.eval([1, 2, 3])  # llama.cpp asks for a removal first and does not look at the answer
    llm.rcache.seq_rm = seq_rm
    """,
        MODEL=str(llama_models.write("mamba", tmp_path)),
    )
    assert out.splitlines()[:2] == ["Mine on purpose", "interrupted None"]
    assert "logged: " in out and "Traceback" in out and "Mine: on purpose" in out.split("logged: ")[1]


def test_options_that_cannot_be_are_errors_in_python(tmp_path: Path) -> None:
    out = run(
        """
    from rcache_plugin.hosts.llama import Llama, install
    for bad in (dict(placement="elsewhere"), dict(spare_cells=-9)):
        try:
            Llama(MODEL, n_ctx=64, n_threads=1, verbose=False, **bad)
        except ValueError as error:
            print(type(error).__name__)
    llm = Llama(MODEL, n_ctx=64, n_threads=1, verbose=False)
    print(llm.rcache.table.size - llm.rcache.checkpoints.n_cells)
    """,
        MODEL=str(llama_models.write("mamba", tmp_path)),
    )
    assert out.split() == ["ValueError", "ValueError", "1"]


def test_a_model_without_states_just_works(tmp_path: Path) -> None:
    model = llama_models.Model("attention", "llama", "attention", *_attention_only()).write(tmp_path / "attention.gguf")
    texts = [
        run(
            f"""
    if MODE == "ours":
        from rcache_plugin.hosts.llama import Llama, caches
    else:
        from llama_cpp import Llama
    llm = Llama({str(model)!r}, n_ctx=64, n_threads=1, verbose=False)
    if MODE == "ours":
        assert llm.rcache is None and caches() == ()
    print(repr(llm("Once upon a time", max_tokens=8, temperature=0)["choices"][0]["text"]))
    """,
            MODE=mode,
            stock=mode == "stock",
        )
        for mode in ("ours", "stock")
    ]
    assert texts[0] == texts[1]


LOGITS = """
    import json
    import numpy as np
    tokens, text = json.loads(TOKENS), json.loads(TEXT)
    if HOST == "reference":
        from rcache_plugin.hosts.mamba import MambaContext, MambaModel
        with MambaModel(MODEL) as model, MambaContext(model, n_threads=2) as context:
            rows = [context.decode(tokens, output="all")]
            rows += [context.decode([token]) for token in text]
            rows = np.concatenate(rows)
    else:
        if HOST == "ours":
            import rcache_plugin.hosts.llama
            rcache_plugin.hosts.llama.install(checkpoint_cells=0)  # else the last token has a step of its own
        import llama_cpp
        llm = llama_cpp.Llama(MODEL, n_ctx=256, n_threads=2, logits_all=True, verbose=False)
        llm.eval(tokens)
        for _ in range(N_GREEDY):
            text.append(int(llm.scores[llm.n_tokens - 1].argmax()))
            llm.eval([text[-1]])
        rows = np.array(llm.scores[: llm.n_tokens])
    np.savez(OUT, rows=rows, text=text)
"""


N_GREEDY = 24


@pytest.mark.parametrize(("model", "least"), [("bundled", 48), ("mamba", 60), ("falcon-mamba", 60)])
def test_reference_host_and_llama_agree_on_a_file(model: str, least: int, tmp_path: Path) -> None:
    """Ours and stock are equal to the last bit; the reference host, on another ggml, as far as `agreement` says.

    It reads what stock has said, so that all 64 positions can be compared; at `least` of them a token wins clearly.
    """
    from rcache_plugin.hosts.mamba import bundled_model

    path = bundled_model() if model == "bundled" else llama_models.write(model, tmp_path)
    tokens = [(7 * i * i + 3 * i + 5) % 250 for i in range(40)]
    found = {}
    for host in ("stock", "ours", "reference"):
        out = tmp_path / f"{host}.npz"
        text = found["stock"]["text"].tolist() if host == "reference" else []
        given = {"TOKENS": json.dumps(tokens), "TEXT": json.dumps(text), "N_GREEDY": N_GREEDY}
        run(LOGITS, HOST=host, MODEL=str(path), OUT=str(out), stock=host == "stock", **given)
        found[host] = dict(np.load(out))
    assert np.array_equal(found["ours"]["rows"], found["stock"]["rows"])
    assert found["ours"]["text"].tolist() == found["stock"]["text"].tolist()
    assert found["stock"]["rows"].shape[0] == len(tokens) + N_GREEDY
    agreement.compare(found["reference"]["rows"], found["stock"]["rows"], Path(path), least)


def test_the_chat_example_gives_stocks_text(tmp_path: Path) -> None:
    """examples/llama_chat.py knows nothing of this package; ``exec`` runs it on the cache."""
    import sys

    from rcache_plugin.hosts.mamba import bundled_model

    example = [str(children.ROOT / "examples" / "llama_chat.py"), str(bundled_model())]
    stock = children.run([sys.executable, *example], env=llama_child.QUIET, timeout=120)
    command = [sys.executable, "-m", "rcache_plugin", "exec", *example]
    ours = children.run(command, env=llama_child.QUIET, timeout=120)
    assert ours.stdout == stock.stdout and stock.stdout.count(">") == 3


def test_a_conversation_outlives_the_process(tmp_path: Path) -> None:
    """CASES 19 and 20: after a restart the same prompt reads one token, a longer one what is new; text as ever."""
    from rcache_plugin.hosts.mamba import bundled_model

    code = """
    from rcache_plugin.hosts.llama import Llama
    llm = Llama(MODEL, n_ctx=512, n_threads=2, verbose=False, **({"checkpoint_cells": 0} if STEP == "fresh" else {}))
    prompt = "And it came to pass in those days, that there went out a decree from Caesar, that all the world should be"
    prompt += " taxed. And all went to be taxed, every one into his own city, and Joseph also went up from Galilee"
    def say(text, n=12):
        return llm(text, max_tokens=n, temperature=0)["choices"][0]["text"]
    if STEP == "save":
        first = say(prompt)
        llm.rcache.save(FILE)
        print(repr(first))
    else:
        if STEP == "load":
            llm.rcache.load(FILE)
        again = say(prompt)
        if STEP == "load":
            read = llm.rcache.stats().tokens_read
            assert read == 1 + 11, read
        longer = say(prompt + again + " And he said unto")
        if STEP == "load":
            stats = llm.rcache.stats()
            assert stats.tokens_read + stats.tokens_replayed - read < 40 and stats.tokens_reused > 60, stats
        print(repr(again), repr(longer))
    """
    names = {"MODEL": str(bundled_model()), "FILE": str(tmp_path / "chat.rcache")}
    first = run(code, STEP="save", **names)
    loaded, fresh = (run(code, STEP=step, **names) for step in ("load", "fresh"))
    assert loaded == fresh and loaded.startswith(first.strip())
