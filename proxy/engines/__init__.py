"""HTTP and control connections to the engines: the client of the hot path and the client of probes.

May import ``proxy.settings`` and ``proxy.errors``; knows nothing of requests, routing or records.
"""
