"""Sweeps over settings: their points, and the journal of one in progress."""
