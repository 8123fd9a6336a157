"""KV events of the engines: from their ZMQ stream into the exact prefix index."""
