"""Tests of ``bench.tournament``."""
