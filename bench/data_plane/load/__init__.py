"""The load generator: a separate process with its HTTP client, job format and prompts.

May import ``bench.data_plane.stub.answers`` (the wire format it checks) and nothing of the proxy under test.
"""
