"""The C++ library of `csrc/`: what it does equals the torch operations beside it, faster on a CPU."""
