"""The sampled tokens' way from the last pipeline stage to the others: one fixed, checked schedule of broadcasts."""
