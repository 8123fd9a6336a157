"""The cost book: workloads of D and P, and learning from measured times."""

from __future__ import annotations

import pytest

from policies.costs.book import CostBook, PrefillJob, Workload, transfer_job
from policies.costs.formulas import PrefillModel, TransferJob, TransferModel, transfer_formula
from policies.costs.transfer_constants import KV_BYTES_PER_TOKEN
from policies.state import FleetState
from policies.types import InstanceView, Role, Transport
from tests.policies.builders import ask, ask_new, decision_for

REQUEST = ask(60_000)
D = InstanceView("d", cached_tokens=20_000, requests=5, prefilling=1, pending_prefill_tokens=3_000, host="h")
P = InstanceView("p", cached_tokens=10_000, requests=9, prefilling=2, pending_prefill_tokens=8_000, host="h")
D, P = (view._replace(transport=Transport.NVLINK) for view in (D, P))


def test_a_workload_is_what_the_decision_saw() -> None:
    workload = Workload.of(REQUEST, D, P, 3, 1_000.0)
    assert workload.decode == PrefillJob("d", 40_000, 20_000, 3_000, 1)
    assert workload.prefill == PrefillJob("p", 50_000, 10_000, 8_000, 2)
    assert workload.transfer == transfer_job(REQUEST, P, D, 2, 1_000.0)
    assert workload.transfer.pair == ("p", "d")
    assert workload.transfer.transport is Transport.NVLINK
    assert workload.transfer.size_bytes == 40_000 * 1_000.0  # the tokens that D lacks, not those that P computes
    assert (workload.transfer.streams, workload.transfer.others) == (7, 2)


def test_without_an_offload_there_is_only_what_d_computes() -> None:
    assert Workload.of(REQUEST, D, None, 0, 1_000.0) == (PrefillJob("d", 40_000, 20_000, 3_000, 1), None, None)


def test_a_committed_decision_carries_its_workload() -> None:
    state, request = FleetState(), ask_new(1, 1_600)
    for name in ("a", "b"):
        state.add_instance(name, Role.KV_BOTH, "h", Transport.NVLINK)
    fleet = state.snapshot(request, 0.0, state.instances)
    commitment = state.commit(request, fleet, decision_for(request, "a", "b"), 0.0)
    assert commitment.workload.decode.new_tokens == 1_600
    assert commitment.workload.transfer is not None
    assert commitment.workload.transfer.others == 0
    assert commitment.workload.transfer.size_bytes == 1_600 * KV_BYTES_PER_TOKEN
    assert fleet.costs is not None
    assert fleet.costs.prefill is state.costs.prefill


def test_a_prefill_returns_what_was_predicted_before_it_taught_anything() -> None:
    book, job = CostBook(), PrefillJob("d", 40_000, 20_000, 3_000, 1)
    fresh = PrefillModel()
    expected_s = fresh.queue_s(3_000, 1) + fresh.predict(40_000, 20_000).seconds
    first_s = book.prefilled(job, 30.0)
    second_s = book.prefilled(job, 30.0)
    assert first_s == pytest.approx(expected_s)
    assert expected_s < second_s < 30.0
    for _ in range(80):
        book.prefilled(job, 30.0)
    assert book.prefilled(job, 30.0) == pytest.approx(30.0, rel=0.1)


@pytest.mark.parametrize(
    ("used", "promised", "learns"), [(0, 0, True), (70_000, -10_000, True), (20_000, 11_000, False)]
)
def test_a_prompt_that_found_no_room_teaches_nothing(used: int, promised: int, learns: bool) -> None:
    """It waited for blocks: with that included, every prefill would look slow, and losing a cache too expensive."""
    view = D._replace(
        kv_capacity_tokens=140_000 if learns else 100_000, kv_used_tokens=used, kv_promised_tokens=promised
    )
    job = Workload.of(REQUEST, view, None, 0, 1_000.0).decode
    assert job.room is learns
    book = CostBook()
    predicted_s = book.prefilled(job, 30.0)
    assert predicted_s == book.prefilled(job, 30.0) if not learns else predicted_s < book.prefilled(job, 30.0)


def test_a_pool_of_unknown_size_counts_as_having_room() -> None:
    assert Workload.of(REQUEST, D._replace(kv_used_tokens=10**9), None, 0, 1_000.0).decode.room


def pulled(job: TransferJob, pending_tokens: int = 0, prefilling: int = 0) -> Workload:
    """A hand-off to a D with this much prefill queued at the decision."""
    return Workload(PrefillJob("d", 40_000, 0, pending_tokens, prefilling), PrefillJob("p", 40_000, 0, 0, 0), job)


def test_a_pull_behind_a_queue_on_d_teaches_nothing_of_the_transfer() -> None:
    book = CostBook()
    job = transfer_job(REQUEST, P, D, 0, KV_BYTES_PER_TOKEN)
    queue_s = book.prefill.queue_s(131_072, 1)
    assert book.transferred(pulled(job, 131_072, 1), 4.3, 0.0) == queue_s > transfer_formula(job)
    assert book.transfer.observations() == {}
    assert book.transfer.failure_rate(job.pair) < TransferModel().prior_failure_rate
    with pytest.raises(ValueError, match="no hand-off"):
        book.transferred(Workload(PrefillJob("d", 1, 0, 0, 0), None, None), 1.0, 0.0)


def test_a_transfer_returns_what_was_predicted_before_it_taught_anything() -> None:
    book = CostBook()
    job = transfer_job(REQUEST, P, D, 0, KV_BYTES_PER_TOKEN)
    assert book.transferred(pulled(job), 9.0, 0.0) == pytest.approx(transfer_formula(job))
    for _ in range(40):
        book.transferred(pulled(job), 9.0, 1.0)
    assert book.transferred(pulled(job), 9.0, 1.0) == pytest.approx(9.0, rel=0.05)
    assert book.at(1.0).transfer.predict(job, 1.0).seconds == pytest.approx(9.0, rel=0.05)


def test_a_decision_keeps_the_costs_it_was_made_with() -> None:
    book = CostBook()
    costs = book.at(5.0)
    book.transferred(pulled(transfer_job(REQUEST, P, D, 0, KV_BYTES_PER_TOKEN)), 99.0, 5.0)
    book.prefilled(PrefillJob("d", 40_000, 0, 0, 0), 99.0)
    assert (costs.prefill, costs.transfer, costs.now_s) == (PrefillModel(), TransferModel(), 5.0)
    assert book.at(5.0).transfer != costs.transfer


def test_failures_raise_the_risk_of_their_pair_and_successes_lower_it() -> None:
    book = CostBook()
    job = transfer_job(REQUEST, P, D, 0, KV_BYTES_PER_TOKEN)
    prior = book.transfer.failure_rate(job.pair)
    book.fell_back(job)
    failed = book.transfer.failure_rate(job.pair)
    book.handed_over(job)
    settled = book.transfer.failure_rate(job.pair)
    assert prior < settled < failed
    assert book.transfer.observations() == {}  # an untimed hand-off teaches no time
    book.transferred(pulled(job), 0.1, 0.0)
    assert book.transfer.failure_rate(job.pair) < settled


def test_long_transfers_of_an_instance_that_left_are_forgotten_as_well() -> None:
    book = CostBook()
    job = TransferJob(("p", "d"), Transport.RDMA, 12e9, 0, 0)
    for _ in range(40):
        book.transferred(pulled(job), 1.0, 0.0)
    book.forget("d")
    # What its transport has learned stays.
    stranger = book.at(0.0).transfer.predict(job._replace(pair=("x", "y")), 0.0)
    assert book.at(0.0).transfer.predict(job, 0.0) == stranger


def test_what_was_known_of_an_instance_that_left_goes_with_it() -> None:
    book = CostBook()
    job = transfer_job(REQUEST, P, D, 0, KV_BYTES_PER_TOKEN)
    other = job._replace(pair=("x", "y"))
    for each in (job, other):
        book.transferred(pulled(each), 9.0, 0.0)
    book.forget("p")
    assert list(book.transfer.observations()) == [("x", "y")]
    assert book.transfer.failure_rate(job.pair) == TransferModel().prior_failure_rate


def test_the_time_of_a_prefill_that_others_may_have_overtaken_teaches_nothing() -> None:
    queued, alone = PrefillJob("d", 40_000, 0, 10_000, 1), PrefillJob("d", 40_000, 0, 0, 0)
    for job, ordered, learns in ((queued, True, False), (queued, False, True), (alone, True, True)):
        book, fresh = CostBook(), CostBook()
        predicted_s = book.prefilled(job, 30.0, ordered=ordered)
        assert predicted_s == CostBook().prefilled(job, 1.0)
        assert (book.prefill != fresh.prefill) is learns
