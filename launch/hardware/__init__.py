"""GPUs and processors of this machine: what they are, and telemetry while a fleet runs."""
