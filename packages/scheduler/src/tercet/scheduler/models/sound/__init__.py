"""Encoders of sound, for models that turn it into text."""
