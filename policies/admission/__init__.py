"""Admission: when a request is sent, now or after other sessions have left room for its context."""
