"""Gemma's families."""
