"""Who is in which cell, and where the next ubatch goes. Knows no tensor, no ggml and no file."""
