"""Replays a trace against an endpoint: the plan, the prompts, the client, progress.

May import ``replayer.records`` and ``replayer.traces``.
"""
