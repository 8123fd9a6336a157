"""Tests of ``sim.core``."""
