"""Triton kernels of paged attention, latent attention and rotary embedding."""
