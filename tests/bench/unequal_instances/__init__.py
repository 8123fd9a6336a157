"""Tests of the comparison on fleets of different speed."""
