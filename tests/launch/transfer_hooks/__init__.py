"""Tests of the connector's hooks without engines."""
