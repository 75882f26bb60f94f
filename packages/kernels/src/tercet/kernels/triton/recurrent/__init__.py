"""Triton kernels of recurrent layers: convolution, gated delta rule, scans."""
