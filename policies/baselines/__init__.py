"""Other routers' policies, from their published formulas, as baselines: one file each."""
