"""Tests of ``sim.server``."""
