"""Dashboard of operators: its pages, and the feed that they read. May import everything in the proxy but ``app``."""
