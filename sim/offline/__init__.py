"""Offline simulation: the router's own decisions over simulated engines in virtual time.

May import ``sim.core``, ``sim.hardware``, ``sim.server.settings``, ``sim.virtual``, ``policies`` and ``replayer``.
"""
