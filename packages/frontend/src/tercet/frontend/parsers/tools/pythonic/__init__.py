"""Calls as Python writes them."""
