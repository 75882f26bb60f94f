"""Model execution: turns plans into tensors and tokens. Torch is imported from here down, and nowhere above."""
