"""Offload planners: whether to prefill on another instance, and on which. One file each."""
