"""Access control: API keys, which listener serves which path, and which headers reach an engine."""
