"""Lists of models: reading them, the index over them, and the error answers that report a missing model."""

from __future__ import annotations

import json

import pytest

from proxy.fleet.instances import Instances
from proxy.fleet.model_lists import is_model_missing
from proxy.fleet.models import ModelList, NoModelListError, ServedModels
from proxy.settings import HealthSettings, InstanceSettings


def listing(*cards: object) -> ModelList:
    return ModelList.read(json.dumps({"object": "list", "data": cards}).encode())


BASE = listing({"id": "base", "parent": None}, {"id": "alias"})
WITH_ADAPTER = listing({"id": "base"}, {"id": "lora", "parent": "base"})


def test_adapters_are_distinguished_from_base_models_and_aliases() -> None:
    assert (BASE.names, BASE.adapters) == ({"base", "alias"}, frozenset())
    assert (WITH_ADAPTER.names, WITH_ADAPTER.adapters, WITH_ADAPTER.base) == ({"base", "lora"}, {"lora"}, {"base"})
    assert WITH_ADAPTER.without("lora").names == {"base"}


@pytest.mark.parametrize("content", [b"", b"\xff", b"5", b"[]", b"{}", b'{"data":null}', b"<html>", b"[" * 100_000])
def test_an_answer_that_is_no_list_is_refused(content: bytes) -> None:
    with pytest.raises(NoModelListError):
        ModelList.read(content)


def test_odd_cards_are_ignored() -> None:
    assert listing(None, 5, {"id": 5}, {}, {"id": "stub", "max_model_len": "x"}).names == {"stub"}


def test_an_instance_without_a_list_lacks_nothing() -> None:
    served = ServedModels({"a": BASE, "b": WITH_ADAPTER, "c": None})
    assert served.lacking("base") == set()
    assert served.lacking("lora") == {"a"}
    assert served.lacking("unknown") == {"a", "b"}
    assert served.names == {"base", "alias", "lora"}


def test_a_context_that_some_refuse_leaves_them_out_and_never_all() -> None:
    served = ServedModels(
        {
            "short": listing({"id": "m", "max_model_len": 100}, {"id": "lora", "parent": "m"}, {"id": "own"}),
            "mid": listing({"id": "m", "max_model_len": 200}),
            "long": listing({"id": "m", "max_model_len": 400}, {"id": "lora", "parent": "m"}),
            "other": BASE,
            "silent": None,
        }
    )
    for tokens, left_out in (
        (0, ""),
        (100, ""),
        (101, "short"),
        (200, "short"),
        (201, "short mid"),
        (9999, "short mid"),
    ):
        assert served.lacking("m", tokens) == {"other", *left_out.split()}, tokens
    assert served.lacking("lora", 101) == {"mid", "other", "short"}
    assert served.lacking("own", 101) == {"mid", "long", "other"}


def test_contexts_are_read_once_for_each_engine_however_many_adapters_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each adapter, a fleet of eight engines with a thousand of them each would stop the proxy for seconds."""
    adapters = [{"id": f"lora-{number}", "parent": "m"} for number in range(50)]
    lists = {
        name: listing({"id": "m", "max_model_len": length}, *adapters) for name, length in (("a", 100), ("b", 200))
    }
    read: list[ModelList] = []
    lengths = ModelList.__dict__["lengths"].func

    def counted(models: ModelList) -> dict[str, int]:
        read.append(models)
        return lengths(models)

    monkeypatch.setattr(ModelList, "lengths", property(counted))
    served = ServedModels(lists)
    assert len(read) == len(lists)
    assert served.lacking("lora-7", 150) == {"a"}


def test_adapters_join_what_base_models_divide() -> None:
    small, large = {"id": "small"}, {"id": "large"}
    lists = {"a": listing(small, {"id": "x", "parent": "small"}), "b": listing(large, {"id": "y", "parent": "large"})}
    assert set(ServedModels(lists).parts.each) == {frozenset("a"), frozenset("b")}
    lists["c"] = listing(large, {"id": "x", "parent": "large"})
    assert ServedModels(lists).parts.each == ()


def test_an_engine_of_unknown_context_keeps_what_the_known_ones_refuse() -> None:
    served = ServedModels({"a": listing({"id": "m", "max_model_len": 100}), "b": listing({"id": "m"})})
    assert (served.lacking("m", 100), served.lacking("m", 101)) == (set(), {"a"})
    alike = ServedModels({name: listing({"id": "m", "max_model_len": 100}) for name in "ab"})
    assert alike.lacking("m", 101) == set()


def test_names_that_clients_make_up_are_not_kept() -> None:
    served = ServedModels({"a": BASE})
    for number in range(1000):
        served.lacking(f"made-up-{number}")
        served.longest(f"made-up-{number}")
    served.lacking("base")
    served.longest("base")
    assert set(served._lacking) == {"base"}
    assert set(served._longest) == {"base"}


def test_the_longest_context_is_known_if_every_engine_that_may_serve_the_model_reports_one() -> None:
    short, long = listing({"id": "m", "max_model_len": 100}), listing({"id": "m", "max_model_len": 200})
    assert ServedModels({"a": short, "b": long, "c": BASE}).longest("m") == 200
    assert ServedModels({"a": short, "b": listing({"id": "m"})}).longest("m") is None
    assert ServedModels({"a": short, "b": None}).longest("m") is None
    assert ServedModels({"a": short}).longest("unknown") is None


def test_a_name_that_is_a_base_model_here_and_an_adapter_there_is_no_base_model() -> None:
    served = ServedModels({"a": listing({"id": "base"}, {"id": "lora"}), "b": WITH_ADAPTER, "c": None})
    assert [served.is_base(name) for name in ("base", "lora", "unknown")] == [True, False, False]


def test_a_change_of_a_list_or_of_the_fleet_applies_at_once() -> None:
    fleet = Instances(
        tuple(InstanceSettings(name=name, url=f"http://127.0.0.1:{port}") for port, name in enumerate("ab", 1)),
        HealthSettings(),
    )
    for name in "ab":
        fleet.probed(name)
    assert fleet.healthy("lora") == {"a", "b"}, "their lists are unknown"
    assert not fleet.all_listed(60.0)
    fleet.listed("a", BASE)
    fleet.listed("b", WITH_ADAPTER)
    assert (fleet.healthy("lora"), fleet.candidates("lora"), fleet.healthy()) == ({"b"}, {"b"}, {"a", "b"})
    assert fleet.all_listed(60.0)
    fleet.lacks("b", "lora")
    assert fleet.healthy("lora") == set()
    fleet.listed("b", WITH_ADAPTER)
    fleet.restarted("b")
    assert (fleet.healthy("base"), fleet.all_listed(60.0)) == ({"a"}, False), "until it lists its models again"
    fleet.remove("a")
    assert "alias" not in fleet.served.names


@pytest.mark.parametrize(
    ("missing", "answer"),
    [
        (True, {"error": {"message": "The model `x` does not exist.", "type": "NotFoundError", "code": 404}}),
        (True, {"object": "error", "message": "The model `x` does not exist.", "code": 404}),
        (True, {"error": {"message": "no", "code": "model_not_found"}}),
        (True, {"error": {"message": "model 'x' not found, try pulling it first"}}),
        (False, {"detail": "Not Found"}),
        (False, {"error": {"message": "Not Found", "code": 404}}),
        (False, {"error": "The model does not exist"}),
        (False, ["The model does not exist"]),
        (False, {"error": {"message": "The model `x` does not exist.", "padding": "x" * 100_000}}),
    ],
)
def test_a_404_about_the_model_is_distinguished_from_one_about_the_path(missing: bool, answer: object) -> None:
    assert is_model_missing(json.dumps(answer).encode()) is missing


def test_a_404_that_is_not_json_is_about_the_path() -> None:
    assert not is_model_missing(b"<html>model does not exist</html>")
