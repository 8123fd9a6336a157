"""Tests of the simulator, in folders that mirror ``sim``."""
