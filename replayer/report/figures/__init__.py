"""Figures of the report: one style, latencies, the fleet over time."""
