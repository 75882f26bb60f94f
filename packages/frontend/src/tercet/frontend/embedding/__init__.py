"""Inputs of encoders: laid out and tokenized here, and their vectors gathered."""
