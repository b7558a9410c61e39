"""rcache: a recurrent-state cache for llama.cpp hosts."""
