"""HTTP endpoints, a folder for each API."""
