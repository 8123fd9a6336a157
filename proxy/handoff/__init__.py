"""KV hand-off between instances: the P and D legs, connector dialects, abandoned pulls, leak detection."""
