"""The policy ``migrate`` against not moving, in the cells of the tournament, at three prices of a transfer.

May import the cells, the tournament, policies, sim and the replayer's statistics.
"""
