"""Speculative decoding: draft tokens, how many, and their verification."""
