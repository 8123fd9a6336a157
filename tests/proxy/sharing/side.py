"""One replica without its store, for tests that carry its messages themselves."""

from __future__ import annotations

import time
from typing import Any

from policies.admission.gate import AdmissionGate
from policies.admission.session_cap import SessionCap
from policies.costs.formulas import PrefillModel
from policies.replicas.shared_sessions import SharedSessions
from policies.state import FleetState
from policies.types import RequestView
from proxy.access.keys import Keys, digest_of
from proxy.access.quotas import Quota
from proxy.fleet.instances import Instances
from proxy.routing.stored_responses import StoredResponses
from proxy.settings import ClientKey, HealthSettings, InstanceSettings, KeySettings, ResponseSettings
from proxy.sharing.drains import DrainMarks
from proxy.sharing.others import Others
from proxy.sharing.own import OwnState
from proxy.sharing.wire import Message, decode, encode

UNIX_S = 1_800_000_000.0


class Side:
    """One replica without its store."""

    def __init__(self, name: str = "here", **limits: Any) -> None:
        run = sum(name.encode())  # unlike that of the messages that tests write
        settings = (InstanceSettings(name="a", url="http://127.0.0.1:1"), InstanceSettings(name="b", url="http://h:2"))
        self.state = FleetState()
        shared = SharedSessions()
        self.state.share(shared)
        for each in settings:
            self.state.add_instance(each.name)
        self.instances = Instances(settings, HealthSettings())
        key = ClientKey(name="team", sha256=digest_of("secret"), **limits)
        self.keys = Keys(KeySettings(client=(key,)))
        self.drains = DrainMarks(name)
        self.responses = StoredResponses(ResponseSettings(), self.instances, 1024)
        self.responses.share()
        self.gate = AdmissionGate(SessionCap(sessions=1, keep_s=30.0), self.state.accounts)
        self.own = OwnState(
            name, run, self.state, shared, self.instances, self.keys, self.drains, self.gate, self.responses
        )
        self.others = Others(
            self.state, self.instances, self.keys, self.drains, self.responses, run, self.gate.elsewhere
        )
        self.began_s = time.monotonic()
        """Allowances count from the moment at which the keys are read."""
        self.doubts: list[str] = []
        self.others.on_doubt = self.doubts.append

    def sends(self, session: str, prompt_tokens: int) -> None:
        """A request of the session is in flight on no known instance from time 0 on."""
        request = RequestView(session, prompt_tokens, session_id=session)
        self.state.accounts.sent(request, "", 0, PrefillModel(), 0.0)

    @property
    def quota(self) -> Quota:
        (quota,) = self.keys.quotas().values()
        return quota

    def remote(self, name: str) -> int:
        account = self.state.ledger.remote.get(name)
        return 0 if account is None else account.requests

    def hears(self, message: Message | None, now_s: float = 0.0) -> None:
        assert message is not None
        self.others.take(decode(encode(message)), now_s, UNIX_S + now_s)
