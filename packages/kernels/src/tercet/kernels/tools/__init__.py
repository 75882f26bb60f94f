"""Commands of `tercet-kernels`: checks, benchmarks and compilation of every operation."""
