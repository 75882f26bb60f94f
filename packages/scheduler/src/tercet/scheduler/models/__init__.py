"""The models that run here: one file per family, on the same decoder and layers."""
