"""A model's `config.json`, read into typed values."""
