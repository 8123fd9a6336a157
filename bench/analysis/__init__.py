"""Analytical studies of a trace, a model, a GPU and a fleet: no engine runs here.

May import ``replayer``, ``policies`` and ``sim``; imported by the command line only.
"""
