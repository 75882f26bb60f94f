"""Models: one file per family, on the same decoder and layers."""
