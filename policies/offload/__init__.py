"""Offload planners, one file each: decide if a prefill runs on another instance, and on which one."""
