"""Starts and checks fleets: engine command lines, supervision, proof of freshness, experiments."""
