"""Decides: request classes, prefix index, in-flight ledger, sessions, routing policies, offload planners.

Everything here is pure or an explicit data structure that is handed the time: no I/O, no clock, no globals.
"""
