"""Alert rules as promtool evaluates them: each fires on its symptom, none fires on a healthy fleet, each is documented.

promtool comes with Prometheus (`make monitoring-tools`); tests that need it skip without it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from policies.row import FAILED_OUTCOMES
from tests.monitoring.names import OF_RULES, ROOT, known_metrics, metrics_in
from tests.test_wording import anchors

FOLDER = ROOT / "configs" / "monitoring"
RULES = FOLDER / "alerts.yml"
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="no promtool: `make monitoring-tools` installs it")

ALERTS: dict[str, dict[str, Any]] = {
    rule["alert"]: rule
    for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
    if "alert" in rule
}


RECORDED: dict[str, str] = {
    rule["record"]: rule["expr"]
    for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
    if "record" in rule
}


def test_the_share_of_errors_counts_the_outcomes_that_top_and_the_dashboard_count_as_failed() -> None:
    counted = re.search(r'outcome=~"([^"]+)"', ALERTS["WarmrouteErrorShare"]["expr"])
    assert counted is not None
    assert set(counted[1].split("|")) == FAILED_OUTCOMES


class Symptom(NamedTuple):
    """Series, in promtool's notation, at whose time ``at`` exactly the ``alerts`` fire."""

    alerts: set[str]
    series: dict[str, str]
    at: str = "30m"
    interval: str = "30s"


def of(metric: str, **labels: str) -> str:
    """A series of one proxy."""
    return metric + "{" + ", ".join(f'{name}="{value}"' for name, value in {"proxy": "p", **labels}.items()) + "}"


def hits(then: str, prompt: str) -> dict[str, str]:
    return {
        of("warmroute_cached_tokens_total", instance="e0", kind="actual"): then,
        of("warmroute_reported_prompt_tokens_total", instance="e0"): prompt,
    }


HEALTHY = {
    of("up", job="warmroute"): "1x60",
    of("warmroute_instance_healthy", instance="e0"): "1x60",
    of("warmroute_instance_healthy", instance="e1"): "1x60",
    of("warmroute_condition", condition="instances"): "1x60",
    of("warmroute_instance_breaker", instance="e0", state="open"): "0x60",
    of("warmroute_instance_breaker", instance="e0", state="closed"): "1x60",
    of("warmroute_instance_breaker_openings_total", instance="e0"): "0x20 1x40",
    of("warmroute_instance_pending_prefill_tokens", instance="e0"): "5000x60",
    of("warmroute_engine_prefix_query_tokens_total", instance="e0"): "0+5000x60",
    of("warmroute_instance_pending_prefill_tokens", instance="e1"): "0x60",
    of("warmroute_engine_prefix_query_tokens_total", instance="e1"): "0x60",
    of("warmroute_config_reloads_total", result="applied"): "0x20 1x40",
    of("warmroute_config_reloads_total", result="refused"): "1x60",
    of("warmroute_requests_total", instance="e0", outcome="ok"): "0+100x60",
    of("warmroute_requests_total", instance="e0", outcome="upstream_error"): "0+1x60",
    of("warmroute_requests_total", instance="", outcome="rejected"): "0+50x60",
    of("warmroute_retries_total", result="budget_exhausted"): "3x60",
    of("warmroute_queue_requests"): "0x20 5 9 0x38",
    of("warmroute_hold_seconds_count", end="sent"): "0+10x60",
    of("warmroute_hold_seconds_count", end="at_bound"): "0+0.5x60",
    of("warmroute_event_loop_late_seconds"): "0.2x60",
    of("warmroute_policy_failures_total", part="policy", name="mine"): "4x60",
    of("warmroute_tls_certificate_not_after_timestamp_seconds"): f"{15 * 86400}x60",
    **hits("0+800x60", "0+1000x60"),
    of("warmroute_recomputation_ratio"): "0.05x60",
    of("warmroute_exact_index_trusted", instance="e0"): "1x60",
    of("warmroute_kv_event_batches_total", instance="e0"): "0+10x60",
    of("warmroute_offloads_total", reason="chosen"): "0+20x60",
    of("warmroute_offloads_total", reason="fell_back_p_error"): "0+1x60",
    of("warmroute_offloads_total", reason="below_threshold"): "0+500x60",
    of("warmroute_traces_total", result="exported"): "0+10x60",
    of("warmroute_traces_total", result="queue_full"): "7x60",
}
"""All that rules look at, in a fleet with the usual share of failures."""


def first_tokens(instance: str, ratio: float, per_interval: float = 2) -> dict[str, str]:
    """Histogram of an instance whose first tokens all take ``ratio`` times as long as predicted."""
    name = "warmroute_instance_first_token_actual_to_predicted_ratio"
    counted, none = f"0+{per_interval}x60", "0x60"
    bounds = {f"{bound:g}": bound for bound in (0.1, 0.2, 0.35, 0.5, 0.7, 1, 1.4, 2, 2.8, 4, 5.6, 8, 16, 50)}
    buckets = {
        of(f"{name}_bucket", instance=instance, le=le): counted if ratio <= bound else none
        for le, bound in bounds.items()
    }
    return {
        **buckets,
        of(f"{name}_bucket", instance=instance, le="+Inf"): counted,
        of(f"{name}_count", instance=instance): counted,
        of("warmroute_instance_healthy", instance=instance): "1x60",
    }


FLEET = {of("warmroute_instance_healthy", instance="e0"): "1x60"}

SYMPTOMS = {
    "healthy": Symptom(set(), HEALTHY),
    "the proxy does not answer": Symptom({"WarmrouteDown"}, {of("up", job="warmroute"): "1x20 0x40"}),
    "a restart of the proxy": Symptom(set(), {of("up", job="warmroute"): "1x59 0"}),
    "an engine is killed": Symptom(
        {"WarmrouteInstanceDown"},
        {**HEALTHY, of("warmroute_instance_healthy", instance="e1"): "1x59 0"},
    ),
    "no engine is left": Symptom(
        {"WarmrouteInstanceDown", "WarmrouteNoInstance"},
        {
            of("warmroute_instance_healthy", instance="e0"): "1x59 0",
            of("warmroute_instance_healthy", instance="e1"): "0x60",
        },
    ),
    "the fleet has no engine, so that no series has one": Symptom(
        {"WarmrouteNoInstance", "WarmrouteConditionNotOk"},
        {of("warmroute_condition", condition="instances"): "0x60"},
    ),
    "a drained engine is stopped": Symptom(
        set(),
        {
            **HEALTHY,
            of("warmroute_condition", condition="instances"): "1x50 0x10",
            of("warmroute_instance_draining", instance="e0"): "0x60",
            of("warmroute_instance_draining", instance="e1"): "0x50 1x10",
            of("warmroute_instance_healthy", instance="e1"): "1x55 0x5",
        },
    ),
    "an engine is killed while another one is drained": Symptom(
        {"WarmrouteInstanceDown"},
        {
            **HEALTHY,
            of("warmroute_condition", condition="instances"): "1x50 0x10",
            of("warmroute_instance_draining", instance="e0"): "0x60",
            of("warmroute_instance_draining", instance="e1"): "0x50 1x10",
            of("warmroute_instance_healthy", instance="e0"): "1x59 0",
            of("warmroute_instance_healthy", instance="e2"): "1x60",
        },
    ),
    "every engine is drained": Symptom(
        {"WarmrouteNoInstance"},
        {**FLEET, of("warmroute_instance_draining", instance="e0"): "0x50 1x10"},
    ),
    "an instance is down": Symptom(
        {"WarmrouteInstanceDown", "WarmrouteConditionNotOk"},
        {
            **HEALTHY,
            of("warmroute_condition", condition="instances"): "1x50 0x10",
            of("warmroute_instance_healthy", instance="e1"): "1x50 0x10",
            of("warmroute_instance_draining", instance="e1"): "0x60",
        },
    ),
    "a breaker is open": Symptom(
        {"WarmrouteBreakerOpen"},
        {**FLEET, of("warmroute_instance_breaker", instance="e0", state="open"): "0x59 1"},
    ),
    "a breaker opens again and again": Symptom(
        {"WarmrouteBreakerOpen"},
        {**FLEET, of("warmroute_instance_breaker_openings_total", instance="e0"): "0x40 0+1x20"},
    ),
    "a breaker that is open, for the fifth time": Symptom(
        {"WarmrouteBreakerOpen"},
        {
            **FLEET,
            of("warmroute_instance_breaker", job="warmroute", instance="e0", state="open"): "0x59 1",
            of("warmroute_instance_breaker_openings_total", job="warmroute", instance="e0"): "0x40 0+1x20",
        },
    ),
    "an engine whose breaker is open is drained": Symptom(
        set(),
        {
            **FLEET,
            of("warmroute_instance_healthy", instance="e1"): "1x50 0x10",
            of("warmroute_instance_breaker", instance="e1", state="open"): "0x50 1x10",
            of("warmroute_instance_draining", instance="e1"): "0x55 1x5",
        },
    ),
    "an engine whose breaker opened again and again is removed": Symptom(
        set(),
        {
            of("warmroute_instance_healthy", instance="e0"): "1x55 stale",
            of("warmroute_instance_breaker_openings_total", instance="e0"): "0x40 0+1x15 stale",
        },
    ),
    "an engine hangs": Symptom(
        {"WarmrouteInstanceStalled"},
        {
            **FLEET,
            of("warmroute_instance_pending_prefill_tokens", instance="e0"): "5000x60",
            of("warmroute_engine_prefix_query_tokens_total", instance="e0"): "0+5000x40 200000x20",
        },
    ),
    "an engine that reports no counters": Symptom(
        set(), {**FLEET, of("warmroute_instance_pending_prefill_tokens", instance="e0"): "5000x60"}
    ),
    "an engine is slow": Symptom(
        {"WarmrouteInstanceSlow"},
        {**first_tokens("e0", 0.4), **first_tokens("e1", 0.5), **first_tokens("e2", 15), **first_tokens("e3", 0.4)},
    ),
    "one of two engines is slow": Symptom(
        {"WarmrouteInstanceSlow"}, {**first_tokens("e0", 0.15), **first_tokens("e1", 7)}
    ),
    "one of two engines is not twice as slow": Symptom(set(), {**first_tokens("e0", 0.9), **first_tokens("e1", 1.6)}),
    "all engines are slower than predicted": Symptom(
        set(), {**first_tokens("e0", 7), **first_tokens("e1", 10), **first_tokens("e2", 7)}
    ),
    "a slow engine with few requests": Symptom(
        set(), {**first_tokens("e0", 0.4), **first_tokens("e1", 15, per_interval=0.25)}
    ),
    "a slow engine is alone": Symptom(set(), first_tokens("e0", 15)),
    "a slow engine is drained": Symptom(
        set(),
        {
            **first_tokens("e0", 0.4),
            **first_tokens("e1", 15),
            of("warmroute_instance_draining", instance="e1"): "0x55 1x5",
        },
    ),
    "settings are refused": Symptom(
        {"WarmrouteReloadRefused"}, {of("warmroute_config_reloads_total", result="refused"): "0x50 1x10"}
    ),
    "a condition": Symptom({"WarmrouteConditionNotOk"}, {of("warmroute_condition", condition="hash_seed"): "1x59 0"}),
    "requests fail": Symptom(
        {"WarmrouteErrorShare"},
        {
            of("warmroute_requests_total", instance="e0", outcome="ok"): "0+100x60",
            of("warmroute_requests_total", instance="e0", outcome="upstream_error"): "0+10x60",
        },
    ),
    "clients leave and are rejected": Symptom(
        set(),
        {
            of("warmroute_requests_total", instance="e0", outcome="ok"): "0+10x60",
            of("warmroute_requests_total", instance="e0", outcome="client_gone"): "0+100x60",
            of("warmroute_requests_total", instance="", outcome="rejected"): "0+100x60",
        },
    ),
    "no more retries": Symptom(
        {"WarmrouteRetryBudgetExhausted"}, {of("warmroute_retries_total", result="budget_exhausted"): "0x50 0+1x10"}
    ),
    "the queue grows": Symptom({"WarmrouteQueueGrowing"}, {of("warmroute_queue_requests"): "0x20 0+5x40"}),
    "a long queue that shrinks": Symptom(set(), {of("warmroute_queue_requests"): "0x20 500-5x40"}),
    "held to the bound": Symptom(
        {"WarmrouteHeldTooLong"},
        {
            of("warmroute_hold_seconds_count", end="sent"): "0+10x60",
            of("warmroute_hold_seconds_count", end="at_bound"): "0+5x60",
        },
    ),
    "the loop is late": Symptom({"WarmrouteEventLoopLate"}, {of("warmroute_event_loop_late_seconds"): "0x40 3x20"}),
    "a policy fails": Symptom(
        {"WarmroutePolicyFailing"}, {of("warmroute_policy_failures_total", part="policy", name="mine"): "0x50 0+1x10"}
    ),
    "a certificate is not renewed": Symptom(
        {"WarmrouteCertificateExpires"}, {of("warmroute_tls_certificate_not_after_timestamp_seconds"): "1200000x60"}
    ),
    "a certificate has expired": Symptom(
        {"WarmrouteCertificateExpires"}, {of("warmroute_tls_certificate_not_after_timestamp_seconds"): "60x60"}
    ),
    "a worker hangs": Symptom(
        {"WarmrouteWorkerHung"}, {of("warmroute_worker_restarts_total", worker="1", reason="hung"): "0x50 1x10"}
    ),
    "a worker crashes": Symptom(
        set(), {of("warmroute_worker_restarts_total", worker="1", reason="ended"): "0x50 1x10"}
    ),
    "the hit rate collapses": Symptom(
        {"WarmrouteHitRateCollapse"}, hits("0+800x120 96000+50x60", "0+1000x180"), at="90m"
    ),
    "the hit rate was always low": Symptom(set(), hits("0+50x120 6000+10x60", "0+1000x180"), at="90m"),
    "the fleet thrashes": Symptom({"WarmrouteThrashing"}, {of("warmroute_recomputation_ratio"): "0.1x40 0.4x20"}),
    "an index is not trusted": Symptom(
        {"WarmrouteKvEventsMissing"}, {of("warmroute_exact_index_trusted", instance="e0"): "1x50 0x10"}
    ),
    "events stop while requests are served": Symptom(
        {"WarmrouteKvEventsMissing"},
        {
            of("warmroute_kv_event_batches_total", instance="e0"): "0+10x40 400x20",
            of("warmroute_prompt_tokens_total", instance="e0"): "0+20000x60",
        },
    ),
    "no events because there is no load": Symptom(
        set(),
        {
            of("warmroute_kv_event_batches_total", instance="e0"): "0+10x40 400x20",
            of("warmroute_prompt_tokens_total", instance="e0"): "0+20000x40 800000x20",
        },
    ),
    "hand-offs fail": Symptom(
        {"WarmrouteOffloadFailures"},
        {
            of("warmroute_offloads_total", reason="chosen"): "0+20x60",
            of("warmroute_offloads_total", reason="fell_back_d_timeout"): "0+10x60",
        },
    ),
    "traces are lost": Symptom(
        {"WarmrouteTracesLost"}, {of("warmroute_traces_total", result="export_failed"): "0x30 0+5x30"}
    ),
}


def test_every_alert_has_a_symptom() -> None:
    assert set().union(*(symptom.alerts for symptom in SYMPTOMS.values())) == set(ALERTS)


@needs_promtool
def test_each_symptom_fires_its_alerts_and_no_other(tmp_path: Path) -> None:
    cases = [
        {
            "name": name,
            "interval": symptom.interval,
            "input_series": [{"series": series, "values": values} for series, values in symptom.series.items()],
            "promql_expr_test": [
                {
                    # Each once: two series of one alert and instance are two notifications of one fault.
                    "expr": 'max by (alertname) (count by (alertname, proxy, instance) (ALERTS{alertstate="firing"}))',
                    "eval_time": symptom.at,
                    "exp_samples": [
                        {"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in sorted(symptom.alerts)
                    ],
                }
            ],
        }
        for name, symptom in SYMPTOMS.items()
    ]
    path = tmp_path / "test.yml"
    tests = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": cases}
    path.write_text(yaml.safe_dump(tests), encoding="utf-8")
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, "test", "rules", path], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_scrape_file_and_rules_are_valid() -> None:
    assert PROMTOOL is not None
    for what, path in (("config", FOLDER / "prometheus.yml"), ("rules", RULES)):
        done = subprocess.run([PROMTOOL, "check", what, path], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_has_what_its_reader_needs(name: str) -> None:
    rule = ALERTS[name]
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
    page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    assert anchor == name.lower()
    assert anchor in anchors((ROOT / page).read_text(encoding="utf-8"))


def test_the_page_of_incidents_has_no_entry_without_an_alert() -> None:
    page = (ROOT / "docs" / "incidents.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^## (Warmroute\w+)$", page, re.MULTILINE)) == set(ALERTS)


def test_recorded_series_are_known_and_read_metrics_that_exist() -> None:
    assert set(RECORDED) == OF_RULES
    for expression in RECORDED.values():
        assert metrics_in(expression) <= known_metrics(), expression


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_reads_metrics_that_exist(name: str) -> None:
    used = metrics_in(ALERTS[name]["expr"])
    assert used
    assert used <= known_metrics(), used - known_metrics()


def test_the_table_of_alerts_names_each_with_its_severity() -> None:
    page = (ROOT / "docs" / "observability.md").read_text(encoding="utf-8")
    listed = {
        name: severity
        for names, severity in re.findall(r"^\| (`Warmroute[^|]*) \| (\w+) \|", page, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", names)
    }
    assert listed == {name: rule["labels"]["severity"] for name, rule in ALERTS.items()}
    assert f"{len(ALERTS)} rules" in page
