"""Words of failures that no engine was the cause of."""

from __future__ import annotations

from proxy.fleet.common_failures import KEPT_S, CommonFailures


def test_words_are_known_for_a_while_after_the_last_failure_in_them() -> None:
    common = CommonFailures()
    assert not common.known("answered 500", 0.0)
    common.add("answered 500", 0.0)
    common.add("answered 500", 10.0)
    assert common.known("answered 500", 9.0 + KEPT_S)
    assert not common.known("answered 500", 10.0 + KEPT_S)
    assert not common.known("answered 501", 10.0)


def test_the_words_seen_last_are_kept() -> None:
    common = CommonFailures()
    for number in range(64):
        common.add(str(number), 0.0)
    common.add("0", 1.0)
    common.add("64", 1.0)
    assert [number for number in range(65) if not common.known(str(number), 1.0)] == [1]
