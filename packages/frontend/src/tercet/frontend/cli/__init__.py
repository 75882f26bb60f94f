"""The `tercet` command: serve, chat, bench, keys and their arguments."""
