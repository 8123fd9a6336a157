"""Pure decision code: request classes, prefix indexes, in-flight ledger, sessions, routing policies, offload planners.

No I/O, clock or globals: functions are pure and data structures receive the time as an argument. Imports only the
standard library, xxhash and numpy.
"""
