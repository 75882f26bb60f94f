"""The pure core: deterministic scheduling, without torch, sockets, clocks or chance."""
