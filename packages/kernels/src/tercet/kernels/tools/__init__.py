"""`tercet-kernels check` and `bench`: verification and benchmarks of every operation."""
