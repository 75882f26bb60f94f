"""Scheduling core of encoders."""
