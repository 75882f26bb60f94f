"""Sampling: parameters per slot, penalties, grammars and the sampler."""
