"""Experiments: arms x repeats x seeds in a defined order, every run on engines proved fresh, all records kept."""
