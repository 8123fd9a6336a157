"""Operation of a running proxy: fleet changes, health probes, reload of settings, shutdown."""
