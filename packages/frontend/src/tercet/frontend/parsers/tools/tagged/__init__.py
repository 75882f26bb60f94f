"""Calls with one element for each argument."""
