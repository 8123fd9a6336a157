"""Routing policies: one file each, with formula, defaults, source and complexity in its docstring."""
