"""Proves that the bundled and the benchmarks' random models agree in stock llama-cpp-python and the reference host.

Both libraries bring a libggml of their own, so each runs in a child process that never sees the other one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import agreement
import children
import gguf
import numpy as np
import pytest

from rcache_plugin.hosts.mamba import bundled_model

ROOT = Path(__file__).resolve().parents[3]
MODEL = bundled_model()
MAKE_RANDOM = ROOT / "examples" / "make_random_gguf.py"

# The hosts round alike but not to the bit, and by how much they differ depends on the processor: see `agreement`. So
# the reference host reads stock's own text, and their choices are compared wherever stock's two best logits are far
# enough apart. With these prompts that is 280 of the 320 tokens here; at each the best leads by 0.025 at least.
PROMPTS = (
    "In the beginning",
    "The LORD is my shepherd;",
    "Blessed are they that",
    "Then said Jesus unto",
    "Now these are the names of the",
)
N_GREEDY = 64
N_COMPARED = 250
"""Of the tokens of all prompts, those that have to be compared at least."""
TEXTS = (
    "In the beginning God created the heaven and the earth.\n",
    "It's 3 o'clock, he'll say;  two spaces,\ttab,\n\ntwo lines, trailing space ",
    "Na\u00efve caf\u00e9 \u2014 \u65e5\u672c\u8a9e \U0001f40d",
    "",
)

STOCK = """
import json, sys
import llama_cpp
import numpy as np
path, prompts, texts, n_greedy, _ = json.load(sys.stdin)
model = llama_cpp.Llama(path, n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False)
def logits():
    values = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(model.ctx, -1), shape=(model.n_vocab(),))
    assert np.isfinite(values).all()
    second, best = np.sort(values)[-2:].tolist()
    return int(values.argmax()), best - second, float(abs(values).max())
def greedy(prompt):
    model.reset()
    model.eval(model.tokenize(prompt.encode(), add_bos=False, special=False))
    steps = [logits()]
    while len(steps) < n_greedy:
        model.eval([steps[-1][0]])
        steps.append(logits())
    return steps
ids = [model.tokenize(text.encode(), add_bos=False, special=False) for text in texts]
back = [model.detokenize(i).decode() for i in ids]
json.dump({"steps": [greedy(p) for p in prompts], "ids": ids, "back": back}, sys.stdout)
"""

REFERENCE = """
import json, sys
import numpy as np
from rcache_plugin.hosts.mamba import MambaContext, MambaModel
path, prompts, texts, n_greedy, given = json.load(sys.stdin)
def greedy(model, prompt, text):
    with MambaContext(model, n_seq_max=1, n_ubatch=128, n_threads=1) as context:
        def step(tokens):
            values = context.decode(tokens)
            assert values.shape == (1, model.n_vocab) and np.isfinite(values).all()
            return int(values[0].argmax())
        tokens = [step(model.tokenizer.encode(prompt))]
        while len(tokens) < n_greedy:
            tokens.append(step(text[len(tokens) - 1 : len(tokens)] or tokens[-1:]))
        return tokens
with MambaModel(path) as model:
    ids = [model.tokenizer.encode(text) for text in texts]
    back = [model.tokenizer.decode(i) for i in ids]
    texts = [greedy(model, *each) for each in zip(prompts, given or [[]] * len(prompts))]
    json.dump({"greedy": texts, "ids": ids, "back": back}, sys.stdout)
"""


def run_host(
    code: str, path: Path, prompts: tuple[str, ...], n_greedy: int, given: list[list[int]] | None = None
) -> dict[str, Any]:
    """What a host makes of a model: greedy tokens after each prompt, ids of `TEXTS`, the texts of these ids.

    `given`: what the reference host reads instead of what it says itself. Stock also tells its steps: token, by how
    much it won, and the largest logit.
    """
    stdin = json.dumps([str(path), prompts, TEXTS, n_greedy, given])
    result: dict[str, Any] = json.loads(children.run_code(code, stdin=stdin, stock=code is STOCK))
    if code is STOCK:
        result["greedy"] = [[token for token, _, _ in steps] for steps in result["steps"]]
    return result


@pytest.fixture(scope="module")
def stock() -> dict[str, Any]:
    return run_host(STOCK, MODEL, PROMPTS, N_GREEDY)


@pytest.fixture(scope="module")
def reference(stock: dict[str, Any]) -> dict[str, Any]:
    return run_host(REFERENCE, MODEL, PROMPTS, N_GREEDY, stock["greedy"])


def field(reader: gguf.GGUFReader, key: str) -> Any:
    found = reader.get_field(key)
    assert found is not None, key
    return found.contents()


def test_the_bundled_model_has_at_most_6_mb() -> None:
    assert MODEL.stat().st_size <= 6_000_000


def test_the_bundled_model_is_a_mamba_with_a_vocabulary_of_its_own() -> None:
    reader = gguf.GGUFReader(MODEL)
    assert field(reader, "general.architecture") == "mamba"
    tokens = field(reader, "tokenizer.ggml.tokens")
    assert 1000 <= len(tokens) == len(set(tokens)) <= 2000
    assert field(reader, "mamba.ssm.inner_size") == 2 * field(reader, "mamba.embedding_length")
    assert field(reader, "mamba.ssm.conv_kernel") == 4
    names = {tensor.name for tensor in reader.tensors}
    assert "output.weight" not in names and "token_embd.weight" in names


def test_both_hosts_give_the_same_greedy_tokens(stock: dict[str, Any], reference: dict[str, Any]) -> None:
    steps = np.array(stock["steps"])
    assert steps.shape == (len(PROMPTS), N_GREEDY, 3)
    clear = steps[..., 1] > 2 * agreement.tolerance(MODEL) * steps[..., 2].max()
    assert clear.sum() >= N_COMPARED
    assert np.array_equal(np.array(reference["greedy"])[clear], steps[..., 0][clear])


def test_the_reference_host_writes_a_text_of_its_own(stock: dict[str, Any]) -> None:
    """The same as stock's up to where rounding may decide, which is beyond these tokens."""
    own = run_host(REFERENCE, MODEL, PROMPTS[:1], 8)
    steps = np.array(stock["steps"][0][:8])
    assert (steps[:, 1] > 2 * agreement.tolerance(MODEL) * steps[:, 2].max()).all()
    assert own["greedy"][0] == stock["greedy"][0][:8]


def test_the_prompts_lead_to_different_texts(stock: dict[str, Any]) -> None:
    assert len({tuple(tokens) for tokens in stock["greedy"]}) == len(PROMPTS)


def test_the_vocabulary_round_trips_in_both_hosts(stock: dict[str, Any], reference: dict[str, Any]) -> None:
    assert reference["ids"] == stock["ids"]
    assert tuple(reference["back"]) == tuple(stock["back"]) == TEXTS


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("random")

    def make(matrix_type: str) -> Path:
        path = folder / f"{matrix_type}.gguf"
        if not path.exists():
            arguments = ["--preset", "tiny", "--type", matrix_type, "-o", str(path)]
            children.run([sys.executable, str(MAKE_RANDOM), *arguments])
        return path

    return make


@pytest.mark.parametrize("matrix_type", ["f32", "f16", "q8_0"])
@pytest.mark.parametrize("code", [STOCK, REFERENCE], ids=["stock", "reference"])
def test_a_random_model_runs_with_finite_logits(
    matrix_type: str, code: str, random_model: Callable[[str], Path]
) -> None:
    result = run_host(code, random_model(matrix_type), ("And",), 4)
    assert len(result["greedy"][0]) == 4
    assert tuple(result["back"]) == TEXTS


def test_a_random_model_depends_on_its_seed_only(tmp_path: Path, random_model: Callable[[str], Path]) -> None:
    again, other = tmp_path / "again.gguf", tmp_path / "other.gguf"
    for path, seed in ((again, "0"), (other, "1")):
        arguments = ["--preset", "tiny", "--type", "f16", "--seed", seed, "-o", str(path)]
        children.run([sys.executable, str(MAKE_RANDOM), *arguments])
    assert again.read_bytes() == random_model("f16").read_bytes()
    assert gguf_data(other) != gguf_data(again)


def gguf_data(path: Path) -> list[bytes]:
    return [tensor.data.tobytes() for tensor in gguf.GGUFReader(path).tensors]
