"""Fields of config.json that the reference declares and reads, listed from its source."""
