"""``bench.dashboard`` runs, and messages stay small enough to send each second."""

from __future__ import annotations

from bench.dashboard import measure


def test_a_message_of_a_large_fleet_is_small() -> None:
    figures = measure(instances=64, requests_per_s=50, in_flight=20, messages=2)
    assert set(figures) == {"message_cpu_ms", "message_kib", "share_of_a_core", "request_in_flight_cpu_us"}
    assert 20 < figures["message_kib"] < 150
