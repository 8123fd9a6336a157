"""Prometheus metrics: the exporter, limits, prediction errors and tallies."""
