"""The policy ``joint`` against ``warm`` on instances that can hand over KV, in the cells of the tournament.

May import the cells, the tournament, policies, sim and the replayer's statistics.
"""
