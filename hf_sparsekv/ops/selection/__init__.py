"""What a step attends to: scores of blocks and tokens, the best of them, predicted queries."""
