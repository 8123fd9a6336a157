"""The tournament: every routing policy on every trace, at several loads, KV pools and fleet sizes, in virtual time.

May import ``policies``, ``replayer`` and ``sim``.
"""
