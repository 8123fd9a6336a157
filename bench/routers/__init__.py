"""Routers compared on the same running engines: arms and their order, the routers' processes, records, tables.

May import `bench.replicas`, `policies`, `replayer`. The command is `bench.gpu.routers_ab`.
"""
