"""The OpenAPI document: descriptions and examples of every endpoint."""
