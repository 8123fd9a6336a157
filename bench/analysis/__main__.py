"""``python -m bench.analysis``: the commands of ``warmroute analyse``."""

from __future__ import annotations

import os
import sys

from bench.analysis.cli import application

if __name__ == "__main__":
    if not sys.stdout.isatty():
        os.environ.setdefault("COLUMNS", "140")
    application()()
