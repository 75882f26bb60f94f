"""Helper processes for work on untrusted input, which may hang or crash."""
