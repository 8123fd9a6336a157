"""Tests of ``bench.data_plane``."""
