"""Bad input on purpose: valid inputs of every reader, mutated, and every option with hostile values."""
