"""GPT-2 in Flax, and the programs that train it and sample from it."""
