"""Runs an experiment: live and simulated arms, one after the other, resumable."""
