"""Sessions of clients: the id a request gives, recognised conversations, and what changes between their turns."""
