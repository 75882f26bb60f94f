"""Encoders of audio, for models that turn it into text."""
