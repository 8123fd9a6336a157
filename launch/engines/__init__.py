"""Engine processes by kind: command lines, environments, and what an engine reports of its KV pool."""
