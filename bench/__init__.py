"""Benchmarks and studies: data plane, routing decision, simulator, tournament, analyses, soak test.

May import every other folder; imported by the command line and the tests only.
"""
