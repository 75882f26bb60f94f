"""The frontend's options and their checks."""
