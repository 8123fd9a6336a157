"""Settings of one worker: those of the proxy, with files and a name of its own."""

from __future__ import annotations

from pathlib import Path

from proxy.settings import Settings
from proxy.workers.hub import replica_name

_INTERVAL_S = 0.01
"""Time between two reports of changes for each worker that there is: so a worker hears as many messages per second,
however many others it has."""


def own_settings(settings: Settings, worker: int, port: int, admin_port: int | None) -> Settings:
    """Settings of worker ``worker``.

    Args:
        settings: those of the proxy.
        worker: its number.
        port: port of the main listener, which the parent has reserved.
        admin_port: that of the admin listener; None: it has none.
    """
    rows, snapshot, sharing = settings.breakdown, settings.snapshot, settings.sharing
    if sharing.url is None:
        interval_s = min(_INTERVAL_S * settings.workers, sharing.ttl_s / 4)
        sharing = sharing.model_copy(update={"replica": replica_name(worker), "publish_interval_s": interval_s})
    elif sharing.replica is not None:
        sharing = sharing.model_copy(update={"replica": f"{sharing.replica}-{worker}"})
    return settings.model_copy(
        update={
            "port": port,
            "admin": settings.admin.model_copy(update={"port": admin_port}),
            "sharing": sharing,
            "breakdown": rows.model_copy(update={"jsonl_path": own_file(rows.jsonl_path, worker)}),
            "snapshot": snapshot.model_copy(update={"path": own_file(snapshot.path, worker)}),
        }
    )


def own_file(path: Path | None, worker: int) -> Path | None:
    """A worker's own file: ``rows.jsonl`` is ``rows.worker-0.jsonl``."""
    return None if path is None else path.with_name(f"{path.stem}.worker-{worker}{path.suffix}")
