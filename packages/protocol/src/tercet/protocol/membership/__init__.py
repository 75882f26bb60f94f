"""Peers: handshake, links, heartbeats and their events."""
