"""Models one vLLM instance: scheduler, KV blocks, timing and KV hand-off, served over HTTP or in virtual time.

``sim.core`` is pure (time is handed in); ``sim.server`` drives it against the wall clock, ``sim.virtual`` against an
event queue.
"""
