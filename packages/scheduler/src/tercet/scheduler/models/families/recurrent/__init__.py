"""Families with recurrent state."""
