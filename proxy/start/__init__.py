"""Checks and log lines before the proxy serves: environment, address, access, one probe of each engine."""
