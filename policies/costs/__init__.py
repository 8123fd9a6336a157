"""Prefill and transfer times in seconds: published formulas, corrected by what this fleet was seen to take."""
