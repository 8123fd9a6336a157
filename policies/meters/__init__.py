"""Meters of a fleet: hit rates and their losses, sums over a sliding window, latched conditions.

May import ``policies.predict`` and ``policies.types``; whatever acts on requests must not import it.
"""
