"""Tests, one folder per folder of the product."""
