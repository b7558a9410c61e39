"""Text from a Mamba GGUF: python mamba_generate.py [MODEL.gguf] [-p PROMPT] [-n TOKENS] [--temp T] [--seed S]"""

import argparse

import numpy as np

from rcache_plugin.hosts.mamba import MambaContext, MambaModel, bundled_model
from rcache_plugin.hosts.mamba.sampling import sample

parser = argparse.ArgumentParser(description="Continue a text with a Mamba.")
parser.add_argument("model", nargs="?", default=bundled_model(), help="GGUF file (default: the bundled model)")
parser.add_argument("-p", "--prompt", default="In the beginning")
parser.add_argument("-n", "--n-predict", type=int, default=64)
parser.add_argument("--temp", type=float, default=0.7, help="0 takes the likeliest token")
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

with MambaModel(args.model) as model, MambaContext(model) as context:
    text = model.tokenizer.stream_decoder()
    rng = np.random.default_rng(args.seed)
    logits = context.decode(model.tokenizer.encode(args.prompt))  # float32 [1, n_vocab], after the last token
    print(args.prompt, end="")
    for _ in range(args.n_predict):
        token = sample(logits[-1], args.temp, rng)
        if token in model.tokenizer.stop_ids:
            break
        print(text.push(token), end="", flush=True)
        logits = context.decode([token])  # continues from the state in the cache
    print(text.finish())
