"""Baselines: policies of other routers, implemented from their published formulas, one file each."""
