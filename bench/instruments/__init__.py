"""Instruments: measurements on running engines, one quantity each, and the calibration that is fitted to them.

``engine`` is all that an instrument knows of an engine, ``over_http`` a real one. May import ``bench.analysis``,
``launch``, ``replayer``, ``policies``, ``sim``, and of the proxy the hand-off's protocol (``proxy.handoff.connectors``,
``proxy.request.bodies``); imported by the command line only.
"""
