"""Serves one simulated engine over HTTP: vLLM's OpenAI API, its metrics, its bootstrap server, and faults on demand.

May import ``sim.core`` and ``sim.hardware``.
"""
