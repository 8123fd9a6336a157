"""Fleet files: the format, its sections, checks, overrides, and the members a file expands to."""
