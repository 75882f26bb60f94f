"""The page at / and /docs: its files, and the stream of the server's status that it shows."""
