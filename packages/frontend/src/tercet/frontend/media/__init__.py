"""Pictures of requests, which a helper process decodes."""
