"""Check that the files of settings can be written, before anything is started."""

from __future__ import annotations

import os
from pathlib import Path

from proxy.access_log import STDOUT
from proxy.settings.section import SettingsError


def check_writable(path: str | Path | None, key: str, *, makes_folders: bool = False) -> None:
    """Raise SettingsError if the file of a setting cannot be appended to; nothing is made or written.

    Args:
        path: the file.
        key: the setting.
        makes_folders: missing folders are made when the file is.
    """
    if path is None or path == STDOUT:
        return
    file = Path(path)
    there = file if file.exists() else file.parent
    while makes_folders and not there.exists():
        there = there.parent
    reason = None
    if file.is_dir():
        reason = "it is a folder"
    elif not there.exists():
        reason = f"there is no {there}"
    elif there != file and not there.is_dir():
        reason = f"{there} is no folder"
    elif not os.access(there, os.W_OK):
        reason = "no permission"
    if reason is not None:
        raise SettingsError(f"{key}: {path} cannot be written: {reason}")
