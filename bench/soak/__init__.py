"""Soak test: many streams through a real proxy while engines are killed, and the checks afterwards.

May import ``launch.processes`` and the proxy's and simulator's command lines; imported by tests only.
"""
