"""Prefix-cache models over a trace: placement rules, eviction policies and the study that compares them.

May import ``replayer``; has no commands, tables or figures.
"""
