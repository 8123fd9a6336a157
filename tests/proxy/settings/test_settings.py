"""Settings: sources and their order, errors with remedies, and the generated page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from proxy.settings import PolicySettings, SettingsError, load_settings
from proxy.settings.reference import reference

ONE = {"instances": [{"url": "http://127.0.0.1:8000"}]}


def test_file_then_environment_then_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "proxy.yaml"
    file.write_text("port: 1111\nhost: 127.0.0.2\nlog_level: debug\ninstances: [{url: 'http://127.0.0.1:8000'}]\n")
    monkeypatch.setenv("WARMROUTE_PORT", "2222")
    monkeypatch.setenv("WARMROUTE_LIMITS__BODY_BYTES", "4096")
    monkeypatch.setenv("WARMROUTE_LOG_LEVEL", "error")
    settings = load_settings(file, log_level="warning")
    assert (settings.host, settings.port, settings.log_level) == ("127.0.0.2", 2222, "warning")
    assert settings.limits.body_bytes == 4096


def test_an_unknown_key_of_a_section_names_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMROUTE_LIMITS__MAX_ATTEMPT", "1")
    named = r"limits\.max_attempt: .*environment variable WARMROUTE_LIMITS__MAX_ATTEMPT"
    with pytest.raises(SettingsError, match=named):
        load_settings(None, instances=["http://127.0.0.1:1"])


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        (
            "WARMROUTE_PORT",
            "",
            "port: Input should be a valid integer.*WARMROUTE_PORT is empty: give a value, or unset",
        ),
        ("WARMROUTE_PORT", "secret-x", r"^environment: 1 problem.*\n  port: .*\(environment variable WARMROUTE_PORT\)"),
        ("WARMROUTE_LIMITS__MAX_ATTEMPTS", "abc", "limits.max_attempts: .*WARMROUTE_LIMITS__MAX_ATTEMPTS"),
        ("WARMROUTE_LIMITS", '{"max_attempts": "abc"}', "limits.max_attempts: .*WARMROUTE_LIMITS"),
        ("WARMROUTE_LIMITS", "5", "limits: .*environment variable WARMROUTE_LIMITS"),
        ("WARMROUTE_POLICY", "5", "policy: .*environment variable WARMROUTE_POLICY"),
        ("WARMROUTE_LIMITS", "max_attempts", "^environment variable WARMROUTE_LIMITS: write a JSON object"),
        ("WARMROUTE_POLICY", "lmetric", 'as {"name": …}, or set one variable for each key, as WARMROUTE_POLICY__NAME$'),
        ("WARMROUTE_FORWARD_HEADERS", "x-a", "WARMROUTE_FORWARD_HEADERS: write its value as JSON"),
        ("warmroute_policy__name", "lienar", "policy: .*environment variable warmroute_policy__name"),
    ],
)
def test_a_bad_variable_is_named_and_not_the_valid_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, says: str
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("instances: ['http://127.0.0.1:8000']\n")
    monkeypatch.setenv(variable, value)
    with pytest.raises(SettingsError) as caught:
        load_settings(file)
    text = str(caught.value)
    assert re.search(says, text), text
    assert "c.yaml" not in text
    assert "EnvSettingsSource" not in text
    assert "secret-x" not in text


def test_a_bad_value_of_the_file_is_blamed_on_no_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("instances: ['http://127.0.0.1:8000']\nlimits: {max_attempts: abc}\n")
    monkeypatch.setenv("WARMROUTE_LIMITS", '{"queue_size": 5}')
    with pytest.raises(SettingsError) as caught:
        load_settings(file)
    assert str(caught.value).startswith(f"{file}: 1 problem\n")
    assert "WARMROUTE" not in str(caught.value)


def test_another_policy_named_by_flag_or_environment_does_not_inherit_the_files_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "proxy.yaml"
    file.write_text(
        "instances: [{url: 'http://127.0.0.1:8000'}]\n"
        "policy: {name: linear, params: {alpha: 2.0}}\n"
        "offload: {planner: threshold, params: {max_in_flight: 9}, prefill_timeout_s: 7}\n"
        "admission: {name: session_cap, params: {sessions: 9}, max_hold_s: 7}\n"
    )
    assert load_settings(file).policy.params == {"alpha": 2.0}
    by_flag = load_settings(file, policy={"name": "lmetric"}, offload={"planner": "never"})
    assert (by_flag.policy.name, by_flag.policy.params) == ("lmetric", {})
    assert (by_flag.offload.planner, by_flag.offload.params, by_flag.offload.prefill_timeout_s) == ("never", {}, 7)
    admission = load_settings(file, admission={"name": "working_set"}).admission
    assert (admission.name, admission.params, admission.max_hold_s) == ("working_set", {}, 7)
    assert load_settings(file, admission={"params": {"keep_s": 1.0}}).admission.params == {"sessions": 9, "keep_s": 1.0}
    monkeypatch.setenv("WARMROUTE_POLICY__NAME", "unified")
    by_environment = load_settings(file)
    assert (by_environment.policy.name, by_environment.policy.params) == ("unified", {})
    assert by_environment.offload.params == {"max_in_flight": 9}


def test_name_defaults_to_the_address() -> None:
    assert load_settings(None, **ONE).instances[0].name == "127.0.0.1:8000"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"polcy": {}}, "polcy: unknown key; did you mean policy"),
        ({"limits": 5}, "limits: expected keys with values, found int"),
        ({"policy": {"name": "linear", "params": [1]}}, "policy.params: expected keys with values, found list"),
        ({"instances": [{"name": "..", "url": "http://127.0.0.1:1"}]}, "clients leave out . and .. of a path"),
        ({"instances": [{"name": "a/./b", "url": "http://127.0.0.1:1"}]}, "clients leave out . and .. of a path"),
        ({"policy": {"name": "lienar"}}, "known: aibrix_prefix, dynamo_cost, joint, least_loaded, linear"),
        ({"policy": {"name": "linear", "params": {"alfa": 1}}}, "it has: alpha"),
        ({"offload": {"planner": "maybe"}}, "known: cost_model, never, static_pd, threshold"),
        ({"admission": {"name": "sometimes"}}, "known: never_hold, session_cap, working_set"),
        ({"admission": {"name": "session_cap", "params": {"keep_s": 1e9}}}, "keep_s"),
        ({"admission": {"max_hold_s": 0}}, "admission.max_hold_s"),
        ({"classes": {"medium_tokens": 9, "heavy_tokens": 9}}, "medium_tokens < heavy_tokens"),
        ({"port": 70000}, "port"),
        ({"grace_s": True}, "grace_s: a number is needed here, not true"),
        ({"limits": {"max_in_flight": False}}, "limits.max_in_flight: a number is needed here, not false"),
        ({"instances": [{"url": "http://a", "data_parallel_rank": True}]}, "a number is needed here, not true"),
        ({"timeouts": {"idle_s": 0}}, "timeouts.idle_s"),
        ({"instances": []}, "instances: give at least one engine"),
        ({"instances": [{"url": "127.0.0.1:8000"}]}, "http://"),
        ({"instances": [{"url": "http://a"}, {"url": "http://a"}]}, "share the same"),
        ({"instances": [{"url": "http://a", "role": "kv_both"}]}, "bootstrap_url"),
        ({"instances": [{"url": "http://a", "role": "both"}]}, "kv_both"),
        ({"instances": ["127.0.0.1:8000"]}, "'127.0.0.1:8000' is not an http:// or https:// URL"),
        ({"instances": [8000]}, "give the engine's URL, such as http://127.0.0.1:8000"),
        ({"instances": {"a": "http://a"}}, "give a list of engines"),
        ({"instances": "[http://a]"}, "URLs separated by commas are accepted too"),
        ({"log_level": "loud"}, "'loud' is no log level: give debug, info, warning or error"),
    ],
)
def test_refusals_name_the_key_and_what_it_takes(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(None, **{**ONE, **wrong})
    assert says in str(caught.value)


def test_an_instance_may_be_its_url_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "proxy.yaml"
    file.write_text("instances: [http://127.0.0.1:8000, {url: 'http://b', name: b}]\n")
    assert [each.name for each in load_settings(file).instances] == ["127.0.0.1:8000", "b"]
    for value in ("http://c, http://d", '["http://c", {"url": "http://d"}]'):
        monkeypatch.setenv("WARMROUTE_INSTANCES", value)
        assert [each.url for each in load_settings(file).instances] == ["http://c", "http://d"]
    monkeypatch.setenv("WARMROUTE_INSTANCES", '{"url": "http://e"}')
    assert [each.url for each in load_settings(None).instances] == ["http://e"]


def test_levels_are_accepted_in_capitals() -> None:
    assert load_settings(None, **ONE, log_level="WARNING").log_level == "warning"


def test_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no settings file at"):
        load_settings(tmp_path / "nope.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("port: [1\n")
    with pytest.raises(SettingsError, match=r"broken\.yaml"):
        load_settings(broken)


@pytest.mark.parametrize("key", ["null", "1", "yes", "2024-01-01"])
def test_a_key_that_yaml_does_not_read_as_text_is_refused(tmp_path: Path, key: str) -> None:
    file = tmp_path / "proxy.yaml"
    file.write_text(f"instances: [http://e]\n{key}: 1\n")
    with pytest.raises(SettingsError, match=r"proxy\.yaml: the key .* is not the name of a setting"):
        load_settings(file)


def test_a_file_that_is_a_list_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "proxy.yaml"
    file.write_text("- http://e\n")
    with pytest.raises(SettingsError, match=r"proxy\.yaml: give settings by name"):
        load_settings(file)


def test_the_shipped_settings_file_loads() -> None:
    settings = load_settings(Path(__file__).parents[3] / "configs" / "proxy.yaml")
    assert [instance.name for instance in settings.instances] == ["inst-0", "inst-1"]
    assert settings.policy == PolicySettings()


def test_no_instance_at_all_is_refused() -> None:
    with pytest.raises(SettingsError, match="instances: give at least one engine: --instance http://HOST:PORT"):
        load_settings(None)


def test_settings_page_is_what_the_code_says() -> None:
    page = Path(__file__).parents[3] / "docs" / "reference" / "settings.md"
    assert page.read_text() == reference(), "run `make reference`"
