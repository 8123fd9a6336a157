"""The engine model of one vLLM instance. It has no clock, no I/O and no asyncio: callers pass engine time in seconds.

Imports the standard library, numpy and xxhash only, nothing else of the project.
"""
