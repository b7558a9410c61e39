"""A chat in the terminal with a prefix cache, on llama-cpp-python: python chat_reuse.py [MODEL.gguf]

Each line of stdin is a question; /again answers the last one anew, /edit TEXT asks TEXT in its place, /reset starts
over, /quit ends. After each answer a line counts the prompt's tokens: "reused" were in some state already, "replayed"
were between the checkpoint and the first new token, "read" are all others.
"""

import argparse
import sys
from collections.abc import Iterator

from rcache_plugin.hosts.llama import Llama
from rcache_plugin.hosts.mamba import bundled_model


def transcript(turns: list[tuple[str, str]]) -> str:
    """The prompt for models without a chat template."""
    return "\n".join(f"User: {question}\nAnswer:{answer}" for question, answer in turns)


def answer(llm: Llama, turns: list[tuple[str, str]], n_predict: int) -> Iterator[str]:
    """The pieces of the answer to the last turn, which has none yet."""
    if "tokenizer.chat_template" in llm.metadata:
        messages = []
        for question, reply in turns:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
        for part in llm.create_chat_completion(messages[:-1], max_tokens=n_predict, temperature=0, stream=True):
            yield part["choices"][0]["delta"].get("content") or ""
    else:
        for part in llm.create_completion(
            transcript(turns), max_tokens=n_predict, temperature=0, stream=True, stop=["\nUser:"]
        ):
            yield part["choices"][0]["text"]


def main() -> None:
    parser = argparse.ArgumentParser(description="A chat with a prefix cache.")
    parser.add_argument("model", nargs="?", default=bundled_model(), help="GGUF file (default: the bundled model)")
    parser.add_argument("-n", "--n-predict", type=int, default=64)
    parser.add_argument("-c", "--ctx", type=int, default=4096)
    parser.add_argument("-t", "--threads", type=int)
    args = parser.parse_args()

    llm = Llama(str(args.model), n_ctx=args.ctx, n_threads=args.threads, verbose=False)
    if llm.rcache is None:
        raise SystemExit(f"{args.model} has no recurrent layers: its states are not in this cache")
    turns: list[tuple[str, str]] = []
    print("> ", end="", flush=True)
    for line in map(str.strip, sys.stdin):
        command, _, rest = line.partition(" ")
        if command == "/quit":
            break
        if command == "/reset":
            turns = []
        elif command in ("/again", "/edit") and not turns:
            print("there is no question yet")
        elif line:
            question = {"/again": turns[-1][0] if turns else "", "/edit": rest}.get(command, line)
            if command in ("/again", "/edit"):
                turns.pop()
            turns.append((question, ""))
            before, text = llm.rcache.stats(), ""
            for piece in answer(llm, turns, args.n_predict):
                print(piece, end="", flush=True)
                text += piece
            turns[-1] = question, text
            after = llm.rcache.stats()
            asked, reused, replayed = (
                getattr(after, name) - getattr(before, name)
                for name in ("tokens_asked", "tokens_reused", "tokens_replayed")
            )
            print(f"\n[{asked} asked: {reused} reused, {replayed} replayed, {asked - reused - replayed} read]")
        print("> ", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
