"""One sustained run of a running fleet under its own settings: replay, memory and use over time, what is left after it.

May import `bench.figures`, `bench.routers`, `launch`, `replayer`.
"""
