"""ZeroMQ sockets, endpoints and CURVE authentication."""
