"""Predicts cached tokens per instance: block hashes, the shadow index, the exact index from KV events.

May import nothing else of ``policies`` but ``policies.types``.
"""
