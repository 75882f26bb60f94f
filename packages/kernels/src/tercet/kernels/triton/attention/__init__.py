"""Triton kernels: paged attention, latent attention and rotary embedding."""
