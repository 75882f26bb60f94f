"""HTTP building blocks: request bodies, server-sent events, API keys, errors."""
