"""Cost of admission in the routing step."""
