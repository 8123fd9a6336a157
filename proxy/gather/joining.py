"""JSON answers of several workers joined into one: a tree of rules in the shape of the answer. No I/O and no clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Join = Callable[[list[Any]], Any]
"""Values of the workers that have the key, in their order -> one value."""
Rules = Mapping[str, Any]
"""Key -> ``Join`` or rules of the object below it; ``*``: of every other key. Keys without rules: ``first``."""


def first(values: list[Any]) -> Any:
    """The first worker's, of what is the same with all."""
    return values[0]


def total(values: list[Any]) -> Any:
    """Sum of numbers; None without any."""
    numbers = [each for each in values if each is not None]
    return _round(sum(numbers)) if numbers else None


def largest(values: list[Any]) -> Any:
    """Largest of numbers or states; None without any."""
    return max((each for each in values if each is not None), default=None)


def smallest(values: list[Any]) -> Any:
    """Smallest of numbers, or false if any is; None without any."""
    return min((each for each in values if each is not None), default=None)


def average(values: list[Any]) -> Any:
    """Mean of numbers; None without any."""
    numbers = [each for each in values if each is not None]
    return _round(sum(numbers) / len(numbers)) if numbers else None


def any_of(values: list[Any]) -> Any:
    """The first that is neither empty, false nor None."""
    return next((each for each in values if each), values[0])


def union(values: list[Any]) -> list[Any]:
    """Entries of all lists, each once."""
    return list({str(entry): entry for each in values for entry in each}.values())


def chained(values: list[Any]) -> list[Any]:
    """Entries of all lists."""
    return [entry for each in values for entry in each]


def newest(key: str, limit: int) -> Join:
    """Entries of all lists in the order of ``key``, the largest first, at most ``limit``."""

    def join(values: list[Any]) -> list[Any]:
        return sorted(chained(values), key=lambda entry: entry.get(key) or 0, reverse=True)[:limit]

    return join


def of_all(rules: Rules) -> Join:
    """Objects joined by rules."""
    return lambda values: joined([each for each in values if each is not None], rules)


def rows(key: Sequence[str], rules: Rules) -> Join:
    """Lists of objects; those with the same values of ``key`` are joined by rules."""

    def join(values: list[Any]) -> list[Any]:
        same: dict[tuple[str, ...], list[Any]] = {}
        for row in chained(values):
            same.setdefault(tuple(str(row.get(name)) for name in key), []).append(row)
        return [joined(each, rules) for each in same.values()]

    return join


def mean_by(weight: str, names: Sequence[str], rules: Rules) -> Join:
    """Objects joined by rules, but the means ``names`` (or objects of them) are weighted by the number ``weight``."""

    def join(values: list[Any]) -> Any:
        answer = joined(values, rules)
        for name in names:
            weights = [(each.get(name), each.get(weight) or 0) for each in values]
            answer[name] = _mean(weights)
        return answer

    return join


def joined(values: Sequence[Any], rules: Rules) -> Any:
    """Join objects by rules; values that are no objects are taken from the first worker."""
    objects = [each for each in values if isinstance(each, Mapping)]
    if not objects:
        return values[0] if values else None
    answer = {}
    for key in dict.fromkeys(name for each in objects for name in each):
        rule = rules.get(key, rules.get("*", first))
        found = [each[key] for each in objects if key in each]
        answer[key] = joined(found, rule) if isinstance(rule, Mapping) else rule(found)
    return answer


def _mean(weighted: list[tuple[Any, float]]) -> Any:
    known = [(value, weight) for value, weight in weighted if value is not None]
    if any(isinstance(value, Mapping) for value, _ in known):
        names = dict.fromkeys(name for value, _ in known for name in value)
        return {name: _mean([(value.get(name), weight) for value, weight in known]) for name in names}
    weight = sum(weight for _, weight in known)
    return round(sum(value * weight for value, weight in known) / weight, 6) if weight else None


def _round(value: Any) -> Any:
    return round(value, 6) if isinstance(value, float) else value
