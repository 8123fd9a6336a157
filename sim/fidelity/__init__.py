"""Accuracy of the simulated engines against recorded ones: read a recording, simulate its requests, compare.

May import ``sim.offline``, ``sim.virtual``, ``sim.core``, ``policies`` and ``replayer``.
"""
