"""What the numbers depend on: samples, batches, rates, sums."""
