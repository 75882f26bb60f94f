"""The HTTP server: application, routes, middleware, protocol and connection limits."""
