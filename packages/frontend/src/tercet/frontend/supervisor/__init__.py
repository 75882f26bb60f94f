"""`tercet serve`: starts, watches and restarts the processes of a server on one machine."""
