"""Families with Mamba 2 layers."""
