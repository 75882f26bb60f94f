"""The stream of the server's status, for pages that show it live."""
