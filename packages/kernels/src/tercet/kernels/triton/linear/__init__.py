"""Triton kernels: matrix products, quantized products and LoRA."""
