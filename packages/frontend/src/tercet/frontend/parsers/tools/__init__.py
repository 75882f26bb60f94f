"""Tool-call notations: a folder for each kind, and a file for each notation."""
