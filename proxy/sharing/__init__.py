"""State that replicas in front of one fleet share: load, use of keys' limits, sessions, drain marks, open breakers.

Every replica owns its own part, reports its changes from one task, and merges what it hears; requests read local memory
only. May import ``policies`` and the folders of ``proxy`` below the router.
"""
