"""Tensor operations of Tercet, each beside a plain-torch reference. Import them from `attention` and `ops`."""
