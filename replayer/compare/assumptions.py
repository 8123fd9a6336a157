"""Values that a comparison assumes where nothing was measured.

Imports nothing: the command line shows them as defaults, without numpy.
"""

ASSUMED_FLOOR = 0.07
"""Largest relative difference between replicates, in 95 of 100 cases, where no replicates are given: published
repetitions of replays on eight GPUs scattered by about 7 %. For times only."""
