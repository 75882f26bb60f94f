"""Version of this package; the wire has a version of its own."""

__version__ = "0.1.0"
