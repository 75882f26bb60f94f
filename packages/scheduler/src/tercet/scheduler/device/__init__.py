"""Devices: choice, memory, threads, staging copies and out-of-memory handling."""
