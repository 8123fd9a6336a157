"""Traces of requests: W3C context, spans, OTLP over HTTP. Imports settings, logs and row types; nothing that serves."""
