"""The engine stub: a process that serves the engines' HTTP API with prepared answers at a controlled pace.

Imports third-party packages only; nothing else of the project.
"""
