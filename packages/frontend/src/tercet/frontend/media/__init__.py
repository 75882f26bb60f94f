"""Images of requests, which a helper process decodes."""
