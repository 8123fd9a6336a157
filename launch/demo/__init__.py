"""The demonstration: simulated engines, several policies on one generated trace, one verdict."""
