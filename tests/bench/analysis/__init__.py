"""Tests of ``bench.analysis``."""
