"""Calls as JSON objects that have the name and the arguments."""
