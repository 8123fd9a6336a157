"""Records of requests beside the ring in memory: rotating files, rows of earlier processes, filters, live feeds,
and batches of requests that have just ended.

May import the standard library and msgspec only; ``proxy.breakdown`` combines them.
"""
