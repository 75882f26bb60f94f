"""The core of schedulers that serve encoders."""
