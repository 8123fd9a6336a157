"""Measurements on a machine with GPUs: shell scripts that start what is measured, and the comparison of routers."""
