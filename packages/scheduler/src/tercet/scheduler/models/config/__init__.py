"""Model configs: `config.json`, parsed into typed values."""
