"""Cost of a request behind several workers. May import ``bench.data_plane`` (engine stub and load generator)."""
