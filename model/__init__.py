"""What is computed (gpt, attention), what is remembered of it (modes, recompute, offload), and in what pieces (tiling)."""
