"""The bytes of the states on their devices. The only room that knows ggml."""
