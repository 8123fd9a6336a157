"""The documentation site: its build, its figures, the pages that name commands, flags and files."""
