"""Tests of ``sim.fidelity``."""
