"""Sessions of the native API: turns that build on the tokens of earlier ones."""
