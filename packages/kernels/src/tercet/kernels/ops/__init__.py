"""Definitions of the operations in plain torch, one in each module; every faster version must equal them."""
