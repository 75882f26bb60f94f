"""Grammars: what an output must be an instance of, and which tokens may therefore come next."""
