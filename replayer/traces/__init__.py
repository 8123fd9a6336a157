"""Traces: formats, loading, session chaining, sampling, synthesis, and the ideal hit rate.

May import ``replayer.records``.
"""
