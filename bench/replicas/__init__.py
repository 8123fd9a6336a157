"""Hit rate and TTFT of one trace through 1, 2, 4 and 8 replicas of the proxy, with and without shared state.

May import ``launch``, ``proxy.settings``, ``replayer``; the tests of replicas start their processes with it.
"""
