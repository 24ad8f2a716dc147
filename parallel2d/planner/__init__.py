"""Which mesh, how much memory, how fast: by formula, and by a trace of the real code."""
