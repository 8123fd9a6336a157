"""Hooks in vLLM's MooncakeConnector that time the stages of each KV transfer: installed, removed, verified.

``warmroute_transfer_hooks`` is copied beside vLLM and runs in the engines; it imports nothing of this project.
"""
