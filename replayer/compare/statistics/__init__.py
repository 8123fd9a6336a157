"""Statistics of a comparison: bootstrap over sessions, tests and their correction, power."""
