"""Profiles of steps and dumps of crashes."""
