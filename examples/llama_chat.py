"""A chat in plain llama-cpp-python, with nothing of this package in it: the same text with and without

    python examples/llama_chat.py MODEL.gguf
    python -m rcache_plugin exec examples/llama_chat.py MODEL.gguf
"""

import sys

from llama_cpp import Llama

llm = Llama(sys.argv[1], n_ctx=1024, n_threads=2, seed=1, verbose=False)
history = ""
for line in ("In the beginning God created", "And the LORD said unto Moses,", "Blessed are the poor in spirit:"):
    history += line
    text = llm(history, max_tokens=32, temperature=0)["choices"][0]["text"]
    history += text + "\n"
    print(f"> {line}\n{text.strip()}")
