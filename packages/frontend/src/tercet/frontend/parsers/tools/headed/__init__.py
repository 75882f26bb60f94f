"""Calls with a header that has the name, and arguments in JSON behind it."""
