"""Layers of models with an encoder and a decoder."""
