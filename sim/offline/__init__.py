"""Offline simulation: the router's own decisions over simulated engines in virtual time."""
