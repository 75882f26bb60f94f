"""The OpenAI HTTP API: one file for each family of endpoints."""
