"""Policies on fleets whose instances differ in speed, in virtual time.

May import the tournament, policies, sim and bench.cells.
"""
