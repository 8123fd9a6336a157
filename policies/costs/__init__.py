"""Prefill and transfer times in seconds: published formulas, corrected by observations of this fleet."""
