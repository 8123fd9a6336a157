"""Dashboard of operators: its pages, and the feed that they read. May import everything of the proxy but the application."""
