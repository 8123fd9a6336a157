"""Tests of an engine with data-parallel ranks."""
