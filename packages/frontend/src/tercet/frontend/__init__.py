"""Frontend of Tercet: the HTTP server, and the supervisor of a one-machine server."""
