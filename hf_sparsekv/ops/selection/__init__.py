"""Selection for a step: scores of blocks and tokens, the best of them, predicted queries."""
