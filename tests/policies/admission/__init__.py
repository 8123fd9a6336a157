"""Tests of policies/admission."""
