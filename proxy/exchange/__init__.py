"""One generation request from its arrival to its last byte: admission, attempts, hand-off, relay, record."""
