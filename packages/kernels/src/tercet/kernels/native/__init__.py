"""Bindings of the C++ library of `csrc/`, which equals the torch operations and is faster on a CPU."""
