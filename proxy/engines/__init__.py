"""HTTP and control connections to the engines: the client of the hot path and the client of probes.

May import ``proxy.settings`` and ``proxy.errors``; independent of requests, routing and records.
"""
