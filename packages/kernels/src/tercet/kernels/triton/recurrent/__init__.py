"""Triton kernels of recurrent layers: convolution, gated delta rule, state space scan."""
