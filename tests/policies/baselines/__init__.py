"""Tests of policies/: what decides."""
