"""Experiment files: the format, inputs, fleets, and the order of runs."""
