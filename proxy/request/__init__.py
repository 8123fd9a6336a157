"""Request and answer bodies: parsing, rewriting, token chunks, and the usage an engine reports."""
