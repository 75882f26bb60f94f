"""Waiting choices: their queue, the order of policies, shares of API keys, prefixes worth waiting for."""
