"""Clients that are not among the project's packages, each in an environment of its own: ``make test-clients``."""
