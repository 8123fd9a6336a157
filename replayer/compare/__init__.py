"""Compares runs of one trace: pairing, effects with intervals, noise floor, freshness, one verdict.

May import ``replayer.records`` and ``replayer.traces``.
"""
