"""Folder for ``PYTHONPATH``, so that engines of the tests start faster."""
