"""Expert parallelism: places of experts on ranks, and the exchange of their tokens."""
