"""A stub name server: answers over UDP on a free loopback port from a table that the test changes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset


class StubDns(asyncio.DatagramProtocol):
    """Records by name and type. Names that the table lacks do not exist."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], list[str]] = {}
        self.rcode: dns.rcode.Rcode | None = None
        """Answer to everything, such as SERVFAIL."""
        self.silent = False
        self.asked = 0
        self.address = ""
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self.asked += 1
        if self.silent:
            return
        query = dns.message.from_wire(data)
        answer = dns.message.make_response(query)
        answer.flags |= dns.flags.AA
        question = query.question[0]
        name, kind = question.name.to_text(), dns.rdatatype.to_text(question.rdtype)
        if self.rcode is not None:
            answer.set_rcode(self.rcode)
        elif not any(known == name for known, _ in self.records):
            answer.set_rcode(dns.rcode.NXDOMAIN)
        elif found := self.records.get((name, kind)):
            answer.answer.append(dns.rrset.from_text(question.name, 1, "IN", kind, *found))
        assert self._transport is not None
        self._transport.sendto(answer.to_wire(), addr)


@asynccontextmanager
async def stub_dns() -> AsyncIterator[StubDns]:
    """A server that answers while the context is open."""
    ours = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    ours.bind(("127.0.0.1", 0))
    transport, server = await asyncio.get_running_loop().create_datagram_endpoint(StubDns, sock=ours)
    server.address = f"127.0.0.1:{ours.getsockname()[1]}"
    try:
        yield server
    finally:
        transport.close()
