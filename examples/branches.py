"""One prompt, several continuations from one checkpoint, on llama-cpp-python: python branches.py [MODEL.gguf]

The prompt has one prefill. Each continuation starts from the checkpoint before the prompt's last token, and reads that
token for its logits.
"""

import argparse
from itertools import islice

from rcache_plugin.hosts.llama import Llama
from rcache_plugin.hosts.mamba import bundled_model

parser = argparse.ArgumentParser(description="Continue one prompt in several ways, with one prefill.")
parser.add_argument("model", nargs="?", default=bundled_model(), help="GGUF file (default: the bundled model)")
parser.add_argument("-p", "--prompt", default="And it came to pass in those days, that there went out a decree")
parser.add_argument("-b", "--branches", type=int, default=8)
parser.add_argument("-n", "--n-predict", type=int, default=24)
parser.add_argument("-t", "--threads", type=int)
parser.add_argument("--temp", type=float, default=0.8)
args = parser.parse_args()

llm = Llama(str(args.model), n_ctx=4096, n_threads=args.threads, verbose=False)
cache = llm.rcache
if cache is None or cache.checkpoints.hybrid:  # an attention half can't be restored: use Llama.generate there
    raise SystemExit(f"{args.model} is not a purely recurrent model")

prompt = llm.tokenize(args.prompt.encode())
llm.eval(prompt[:-1])
start = cache.checkpoints.make(0)
for seed in range(args.branches):
    cache.checkpoints.restore(start, 0)  # points sequence 0 at the checkpoint, copies nothing
    llm.n_tokens = start.n_tokens
    llm.set_seed(seed)
    tokens = list(islice(llm.generate(prompt[-1:], temp=args.temp, reset=False), args.n_predict))
    text = llm.detokenize(tokens, prev_tokens=prompt).decode(errors="replace")
    print(f"{seed}: {' '.join(text.split())}")
cache.checkpoints.release(start)

stats = cache.stats()
afresh = args.branches * (len(prompt) + args.n_predict - 1)
print(f"{len(prompt)} tokens of prompt, {args.branches} continuations of {args.n_predict}: {stats.tokens_read} tokens "
      f"read, {stats.tokens_replayed} replayed; {afresh} without the checkpoint")
