"""The load generator: a process of its own with its HTTP client, its job format and its prompts.

May import ``bench.data_plane.stub.answers`` (the wire format it checks) and nothing of the proxy under test.
"""
