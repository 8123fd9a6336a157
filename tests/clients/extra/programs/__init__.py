"""Programs that tests run with a client's own Python; they import nothing of the project."""
