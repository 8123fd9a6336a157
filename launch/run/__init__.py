"""Runs a fleet: processes and their guards, the supervisor and its watch, state on disk, checks at start."""
