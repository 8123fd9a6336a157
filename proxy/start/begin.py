"""The first steps of a proxy, the same for the parent of workers and for a proxy of one process."""

from __future__ import annotations

import logging
import os

from proxy import logs
from proxy.clients.bounds import few_descriptors
from proxy.settings import Settings
from proxy.start.address import check_addresses
from proxy.start.environment import unknown_variables
from proxy.start.openness import is_exposed, openness

log = logging.getLogger("warmroute.server")


def begin(settings: Settings) -> None:
    """Set up the log, and check and report what concerns the proxy as a whole. Raises ListenError."""
    logs.configure(settings.log_level, settings.log_format)
    for sentence in unknown_variables(os.environ, settings):
        log.warning("%s", sentence)
    if few := few_descriptors(settings):
        log.warning("%s", few)
    check_addresses(settings)
    log.log(logging.WARNING if is_exposed(settings) else logging.INFO, "%s", openness(settings))
