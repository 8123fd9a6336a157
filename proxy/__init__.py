"""The serving proxy: OpenAI API in, engine HTTP out, KV hand-off, health, admin, metrics. Imports policies only."""
