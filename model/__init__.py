"""What is computed (gpt, attention), what is remembered of it (recompute, offload), and in what pieces (tiling)."""
