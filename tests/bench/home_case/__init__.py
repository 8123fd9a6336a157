"""Tests of `bench.home_case`."""
