"""Triton kernels of matrix products, quantized products and LoRA."""
