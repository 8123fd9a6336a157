"""Metrics of the fleet as a whole: its instances, their discovery, other replicas of the proxy."""
