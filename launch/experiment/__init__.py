"""Experiments: arms x repeats x seeds in a stated order, every run from engines proved fresh, all records kept."""
