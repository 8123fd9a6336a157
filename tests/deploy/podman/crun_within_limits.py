#!/usr/bin/env python3
"""crun for a caller that may not raise its limits: those of a container are lowered to the caller's own.

Podman sets limits of its own for each container, which needs CAP_SYS_RESOURCE.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any


def lowered(limit: dict[str, Any]) -> dict[str, Any]:
    """A limit of the OCI specification that this process may set."""
    hard = resource.getrlimit(getattr(resource, limit["type"]))[1]
    most = sys.maxsize if hard == resource.RLIM_INFINITY else hard
    return {**limit, "hard": min(limit["hard"], most), "soft": min(limit["soft"], most)}


def main(words: list[str]) -> None:
    """Rewrite the file that crun reads, then become crun."""
    if "--bundle" in words:
        path = Path(words[words.index("--bundle") + 1], "config.json")
        content = json.loads(path.read_text(encoding="utf-8"))
        process = content["process"]
        process["rlimits"] = [lowered(limit) for limit in process.get("rlimits", [])]
        path.write_text(json.dumps(content), encoding="utf-8")
    os.execvp("crun", ["crun", *words])


if __name__ == "__main__":
    main(sys.argv[1:])
