"""Parts that comparisons in the cells of the tournament share.

May import the tournament, policies, sim and the replayer's statistics.
"""
