"""The client's side of a connection: the HTTP protocol of the listener and the exchange with one client."""
