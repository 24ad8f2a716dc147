"""Which mesh, how much memory, how fast: by formula, before anything is launched. No torch."""
