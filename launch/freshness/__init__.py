"""Proof that a fleet is fresh: engines' counters, start times, GPUs without foreign processes."""
