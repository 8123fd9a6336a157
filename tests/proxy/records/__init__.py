"""Tests of rotating files, feeds, filters and pages of rows."""
