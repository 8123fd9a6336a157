"""Tests of `bench.fidelity`."""
