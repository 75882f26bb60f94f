"""Clips of requests, whose frames a helper process decodes."""
