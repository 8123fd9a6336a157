"""Tests of ``sim.offline``."""
