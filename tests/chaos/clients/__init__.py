"""Hostile and unusual clients: bounds, connections, bodies, pipelining, smuggling, floods."""
