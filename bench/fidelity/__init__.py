"""Accuracy of the simulator against published tables, recordings of real engines, and itself in real time.

May import ``sim``, ``launch``, ``replayer`` and ``policies``.
"""
