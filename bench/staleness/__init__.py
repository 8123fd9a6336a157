"""Routing policies when several replicas decide on stale views of a large fleet, in virtual time: docs/staleness.md.

``python -m bench.staleness`` simulates every policy behind one replica and behind 16, with news between replicas that
are 50 ms to 2 s old, on 1,000 instances, with three seeds of trace and noise. May import ``policies``, ``replayer`` and
``sim``.
"""
