"""Tests of the benchmarks and studies, in folders that mirror ``bench``."""
