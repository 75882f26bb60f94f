"""The HTTP part of Tercet, and the supervisor of a one-machine server."""
