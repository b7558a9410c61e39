"""Proves what the examples print, run as a user runs them, and that it is the text of a run that reuses nothing."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import children
import llama_child
import llama_models
import pytest

from rcache_plugin.hosts.mamba import bundled_model

EXAMPLES = children.ROOT / "examples"
BUNDLED = str(bundled_model())
FIGURES = re.compile(r"\[(\d+) asked: (\d+) reused, (\d+) replayed, (\d+) read\]")

QUESTIONS = """Who is the shepherd of the sheep, and what shall he give unto them?
And what did he say unto them in that day?
/again
/edit And where is the king of Israel, that hath not hearkened?
/reset
Who is the shepherd of the sheep, and what shall he give unto them?
/quit
never asked
"""

STOCK = """
    import json
    from llama_cpp import Llama
    llm = Llama(BUNDLED, n_ctx=1024, n_threads=1, verbose=False)
    answers = []
    for prompt in json.loads(PROMPTS):
        llm.reset()
        answers.append(llm(prompt, max_tokens=24, temperature=0, stop=["\\nUser:"])["choices"][0]["text"])
    print(json.dumps(answers))
"""


def run_example(name: str, *arguments: str, stdin: str | None = None) -> str:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    return children.run(command, env=llama_child.QUIET, timeout=240, stdin=stdin).stdout


def test_the_chat_reads_no_prompt_twice_and_says_so() -> None:
    out = run_example("chat_reuse.py", "-t", "1", "-n", "24", "-c", "1024", stdin=QUESTIONS)
    figures = [tuple(map(int, found)) for found in FIGURES.findall(out)]
    answers = re.findall(r"> (?:> )*([^>]*?)\n\[", out)
    assert len(figures) == len(answers) == 5 and "never asked" not in out
    for asked, reused, replayed, read in figures:
        assert asked == reused + replayed + read and read > 0
    first, second, again, edited, back = figures
    assert first[1:] == (0, 0, first[0])
    assert first[0] <= second[1]  # the first question and its answer are there
    assert again[0] == second[0] and again[3] == 1  # the last token is read for its logits
    assert edited[1] >= second[1] - 1 and edited[2] + edited[3] <= edited[0] - second[1] + 1
    assert back[0] == first[0] and back[3] == 1  # /reset forgets the chat, not its states

    q = [line.removeprefix("/edit ") for line in QUESTIONS.splitlines()]
    turn = f"User: {q[0]}\nAnswer:"
    prompts = [turn, *(f"{turn}{answers[0]}\nUser: {question}\nAnswer:" for question in (q[1], q[1], q[3])), turn]
    code = f"    BUNDLED, PROMPTS = {BUNDLED!r}, {json.dumps(prompts)!r}\n" + STOCK
    fresh = json.loads(children.run_code(code, env=llama_child.QUIET, stock=True))
    assert answers == fresh


TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>\n{% endfor %}<assistant>"

CHATS = """
    import json
    from llama_cpp import Llama
    llm = Llama(MODEL, n_ctx=1024, n_threads=1, verbose=False)
    messages, answers = [], []
    for n_kept, question in json.loads(ASKED):
        messages = [*messages[:n_kept], {"role": "user", "content": question}]
        llm.reset()
        # In pieces, as the example asks: llama-cpp-python leaves characters of several tokens out then.
        pieces = llm.create_chat_completion(messages, max_tokens=24, temperature=0, stream=True)
        answers.append("".join(piece["choices"][0]["delta"].get("content", "") for piece in pieces))
        messages.append({"role": "assistant", "content": answers[-1]})
    print(json.dumps(answers))
"""


@pytest.mark.parametrize("name", ["mamba", "jamba"])
def test_the_chat_uses_a_models_own_template(name: str, tmp_path: Path) -> None:
    model = llama_models.models()[name].write(tmp_path / "chat.gguf", chat_template=TEMPLATE)
    q = ["x" * 60 + " tell me of the sea", "and of the land, and of all that is upon it", "and of the stars of heaven"]
    stdin = f"{q[0]}\n{q[1]}\n/edit {q[2]}\n/again\n"
    out = run_example("chat_reuse.py", str(model), "-t", "1", "-n", "24", "-c", "1024", stdin=stdin)
    answers = re.findall(r"> (.*?)\n\[\d+ asked", out, re.S)
    first, second, edited, again = (tuple(map(int, found)) for found in FIGURES.findall(out))
    assert first[1:] == (0, 0, first[0]) and second[1] >= first[0] - len("<assistant>")
    assert edited[2] + edited[3] < len(q[2]) + 64 and again[1] + again[2] == again[0] - 1

    asked = [(0, q[0]), (2, q[1]), (2, q[2]), (2, q[2])]  # messages left in the prompt, and the next
    code = f"    MODEL, ASKED = {str(model)!r}, {json.dumps(asked)!r}\n" + CHATS
    fresh = json.loads(children.run_code(code, env=llama_child.QUIET, stock=True))
    assert answers == [re.sub("\r\n?", "\n", each) for each in fresh]  # as reading text from a pipe does


def test_the_chat_wants_a_question_first() -> None:
    out = run_example("chat_reuse.py", "-t", "1", "-c", "256", stdin="/again\n/edit other\n\n")
    assert out.count("there is no question yet") == 2 and not FIGURES.search(out)


BRANCHES = """
    import json
    from itertools import islice
    from llama_cpp import Llama
    llm = Llama(BUNDLED, n_ctx=4096, n_threads=1, verbose=False)
    prompt = llm.tokenize(PROMPT.encode())
    texts = []
    for seed in range(8):
        llm.reset()
        llm.eval(prompt[:-1])
        llm.set_seed(seed)
        tokens = list(islice(llm.generate(prompt[-1:], temp=0.8, reset=False), 24))
        texts.append(" ".join(llm.detokenize(tokens, prev_tokens=prompt).decode(errors="replace").split()))
    print(json.dumps([len(prompt), texts]))
"""


def test_branches_read_the_prompt_once() -> None:
    prompt = "And the children of Israel did that which was evil in the sight of the LORD, and served other gods"
    *lines, last = run_example("branches.py", "-t", "1", "-p", prompt).splitlines()
    code = f"    BUNDLED, PROMPT = {BUNDLED!r}, {prompt!r}\n" + BRANCHES
    n_prompt, fresh = json.loads(children.run_code(code, env=llama_child.QUIET, stock=True))
    assert [line.partition(": ")[2] for line in lines] == fresh and len(set(fresh)) > 1
    read = n_prompt - 1 + 8 * 24  # each branch: the prompt's last token, and 23 of its own
    assert last.startswith(f"{n_prompt} tokens of prompt, 8 continuations of 24: {read} tokens read, 0 replayed;")


def test_the_host_from_scratch_speaks_this_version() -> None:
    out = run_example("host_from_scratch.py")
    assert out.count("read from") == 3 and "rows:" in out


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_every_example_says_how_it_is_run(example: Path) -> None:
    assert example.name in example.read_text().split('"""')[1] or example.name == "mamba_gguf.py"
