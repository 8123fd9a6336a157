"""Tables of a data-plane run: medians per round, ratios to each peer, targets, terminal and Markdown output.

May import the record types of ``bench.data_plane``; starts no process.
"""
