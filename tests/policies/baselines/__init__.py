"""Tests of the baseline policies."""
