"""Errors of a line or file that is not the JSON that was expected."""

from __future__ import annotations

import msgspec

BAD_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors that msgspec raises; bytes that are not UTF-8, and brackets a thousand deep, have Python's own."""
