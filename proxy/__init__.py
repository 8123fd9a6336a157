"""Serves: OpenAI API in, engine HTTP out, KV hand-off, health, admin, metrics."""
