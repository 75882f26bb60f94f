"""Prefix cache: pools of pages, and the radix tree over them, with snapshots of recurrent states."""
