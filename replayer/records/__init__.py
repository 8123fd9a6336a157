"""Records of a run: the JSONL file format, proxy breakdown rows, the journal, the summary.

The lowest layer of the replayer; imports nothing else of it.
"""
