"""Tests of the commands that ask a running proxy."""
