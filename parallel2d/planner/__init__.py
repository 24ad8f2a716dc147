"""Which mesh, how much memory, how fast: by formula, without torch, and by a trace of the real code."""
