"""Rows of the newly verified positions: from the target's hidden states to pinned host memory and to rank 0's ring."""
