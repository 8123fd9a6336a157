"""Tests of the comparison of routers."""
