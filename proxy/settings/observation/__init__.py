"""Settings of meters, shadow policies and traces. Imports `proxy.settings.section` and the policies only."""
