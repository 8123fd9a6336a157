"""Serving a request for as long as its client is there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from policies.row import RequestOutcome, Row
from proxy.clients.inbound import Inbound
from proxy.exchange.relay import ClientStalledError


async def while_connected(
    inbound: Inbound, row: Row, serving: Coroutine[Any, Any, None], cut_short: Callable[[], None]
) -> None:
    """Run ``serving`` to its end, or cancel it when the client disconnects or does not read; records that outcome.

    Args:
        inbound: the client side.
        row: of the request.
        serving: answers it.
        cut_short: ends the answer when the proxy shuts down.

    Raises:
        CancelledError: the proxy shuts down.
    """
    task = asyncio.current_task()
    assert task is not None
    inbound.on_gone = task.cancel
    try:
        if inbound.gone:
            serving.close()
            row.outcome = RequestOutcome.CLIENT_GONE
        else:
            await serving
    except asyncio.CancelledError:
        if inbound.gone and task.uncancel() == 0:
            row.outcome = RequestOutcome.CLIENT_GONE
        else:
            row.outcome = RequestOutcome.SHUTDOWN
            cut_short()
            raise
    except ClientStalledError as error:
        row.outcome, row.error = RequestOutcome.CLIENT_GONE, str(error)
        inbound.abandon()
    finally:
        inbound.on_gone = None
