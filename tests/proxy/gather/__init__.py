"""Answers of several workers merged into one."""
