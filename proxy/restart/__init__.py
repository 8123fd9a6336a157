"""Snapshots of the shadow index and the session table on disk, for the next process.

May import everything of ``proxy`` up to the core.
"""
