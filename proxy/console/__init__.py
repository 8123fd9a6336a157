"""Commands of the operator that ask a running proxy: ``explain`` and ``top``.

May import policies' types, httpx and rich; nothing of the serving side.
"""
