"""Write the Grafana dashboards of ``deploy/grafana``.

Usage: python tools/dashboards.py

The tables below are the dashboards: panels with their title, unit and PromQL expressions. Labels of a series are in its
legend; the variable ``instance`` selects nodes. ``tests/unit/deploy/test_monitoring.py`` compares the files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, NamedTuple

__all__ = ["DASHBOARDS", "render"]

FOLDER = Path(__file__).resolve().parents[1] / "deploy" / "grafana"
WIDTH: Final = 8
"""Columns of a panel; Grafana's grid has 24."""
HEIGHT: Final = 8


class Panel(NamedTuple):
    """A chart. ``series`` maps legends to expressions; ``@`` stands for the labels that select the instances."""

    title: str
    unit: str
    series: dict[str, str]


def _rate(name: str) -> str:
    return f"rate(penstock_{name}_total@[$__rate_interval])"


def _gauge(name: str) -> str:
    return f"penstock_{name}@"


def _rates(unit: str, title: str, **names: str) -> Panel:
    return Panel(title, unit, {legend: _rate(name) for legend, name in names.items()})


def _gauges(unit: str, title: str, **names: str) -> Panel:
    return Panel(title, unit, {legend: _gauge(name) for legend, name in names.items()})


DASHBOARDS: Final[dict[str, list[Panel]]] = {
    "node": [
        _gauges("bool", "Ready", ready="node_ready"),
        Panel("Uptime", "s", {"uptime": f"time() - {_gauge('node_start_time_seconds')}"}),
        _gauges("bytes", "Disk", used="disk_used_bytes", free="disk_free_bytes"),
        _gauges("bool", "Failures", mqtt="mqtt_storage_failed", statestore="statestore_failed", tube="tube_failed",
                out_of_space="disk_out_of_space", reload="access_reload_failed"),
        _rates("cps", "Pauses and clock steps", pauses="node_stalls", clock_steps="node_clock_steps"),
        _gauges("s", "Clock offset", offset="node_clock_offset_seconds", versions="statestore_version_lead_seconds"),
        Panel("Certificates expire in", "s", {
            "{{listener}}": f"{_gauge('mqtt_listener_certificate_expiry_timestamp_seconds')} - time()",
            "{{listener}} ": f"{_gauge('listener_certificate_expiry_timestamp_seconds')} - time()",
        }),
        _rates("reqps", "Access", accepted="access_authenticated", credentials="access_refused_credentials",
               policy="access_refused_policy", revoked="access_revoked"),
        Panel("Duration of commits: 99th percentile", "s", {
            "{{part}}": "histogram_quantile(0.99, sum by (instance, part, le) ("
                        "rate(penstock_commit_duration_seconds_bucket@[$__rate_interval])))"
        }),
        _rates("cps", "Audit trail", entries="audit_entries", refused="audit_refused_requests",
               failed="audit_failed_writes"),
    ],
    "mqtt": [
        _gauges("none", "Clients", connected="mqtt_connections", sessions="mqtt_sessions"),
        _rates("cps", "Messages", received="mqtt_publishes_received", sent="mqtt_publishes_sent"),
        _rates("Bps", "Traffic", received="mqtt_received_bytes", sent="mqtt_sent_bytes"),
        _rates("cps", "Dropped messages", queue_full="mqtt_dropped_queue_full", expired="mqtt_dropped_expired",
               offline="mqtt_dropped_offline", too_large="mqtt_dropped_too_large", refused="mqtt_dropped_refused"),
        _rates("cps", "Refused messages", policies="mqtt_refused_unauthorized", queue_full="mqtt_refused_queue_full",
               out_of_space="mqtt_refused_out_of_space", rate_limit="mqtt_rate_limited_messages"),
        _gauges("none", "Queues", queued="mqtt_queued_messages", inflight="mqtt_inflight_messages",
                unacknowledged="mqtt_unacknowledged_messages"),
        _gauges("bytes", "Queued bytes", queued="mqtt_queued_bytes", retained="mqtt_retained_bytes"),
        _rates("cps", "Commits", commits="mqtt_storage_commits", changes="mqtt_storage_changes"),
        Panel("Connections by listener", "none", {"{{listener}}": _gauge("mqtt_listener_connections")}),
        Panel("Refused connections by listener", "cps", {
            "{{listener}} refused": _rate("mqtt_listener_refused"),
            "{{listener}} TLS": _rate("mqtt_listener_tls_failures"),
        }),
        _rates("cps", "Closed connections", protocol_errors="mqtt_protocol_errors", write_stalls="mqtt_write_stalls"),
        Panel("Bridges", "cps", {
            "{{bridge}} sent": _rate("bridge_sent"),
            "{{bridge}} received": _rate("bridge_received"),
            "{{bridge}} retries": _rate("bridge_retries"),
        }),
    ],
    "state-store": [
        _rates("reqps", "Requests", requests="statestore_requests", responses="statestore_responses"),
        _gauges("none", "Keys", keys="statestore_keys"),
        _gauges("bytes", "Size", size="statestore_bytes"),
        _rates("cps", "Notifications", sent="statestore_notifications",
               undelivered="statestore_notifications_undelivered"),
        _rates("cps", "Refused", invalid="statestore_refused_requests", quota="statestore_refused_quota",
               share="statestore_refused_share"),
        Panel("Denied by the policies", "cps", {"{{verb}}": _rate("statestore_denied_requests")}),
        _rates("cps", "Responses without a subscription", nobody="statestore_responses_undelivered"),
        _gauges("s", "Lead of the versions over the clock", lead="statestore_version_lead_seconds"),
        Panel("Change capture: waiting", "none", {"{{topic}}": _gauge("capture_waiting_changes")}),
        Panel("Change capture: oldest change", "s", {"{{topic}}": _gauge("capture_oldest_age_seconds")}),
    ],
    "tubemq": [
        _rates("cps", "Messages", produced="tube_produced_messages", fetched="tube_fetched_messages"),
        _rates("Bps", "Traffic", received="tube_received_bytes", sent="tube_sent_bytes"),
        _gauges("bytes", "Stored", stored="tube_stored_bytes", staged="tube_staged_bytes"),
        _gauges("none", "Clients", connections="tube_connections", registrations="tube_registrations",
                waiting_fetches="tube_waiting_fetch_requests"),
        _rates("reqps", "Requests", requests="tube_requests", refused="tube_refused_requests",
               expired="tube_expired_requests"),
        Panel("Consumer groups: lag", "s", {"{{group}}": _gauge("group_lag_seconds")}),
        Panel("Consumer groups: records behind", "none", {"{{group}}": _gauge("group_lag_records")}),
        _rates("cps", "Commits", groups="tube_commits", batches="tube_committed_batches"),
        Panel("Rules: messages", "cps", {
            "{{filter}} received": _rate("rule_received"),
            "{{filter}} appended": _rate("rule_appended"),
            "{{filter}} refused": _rate("rule_refused"),
        }),
        Panel("Rules: waiting", "none", {"{{filter}}": _gauge("rule_waiting_messages")}),
        _rates("cps", "Damage", reads="tube_damaged_reads", losses="tube_recovered_losses"),
    ],
    "pipelines": [
        Panel(title, unit, {f"{{{{pipeline}}}}/{{{{sink}}}}{suffix}": f"{function}penstock_pipeline_{name}{end}"
                            for suffix, function, name, end in series})
        for title, unit, series in (
            ("Lag", "s", [("", "", "lag_seconds", "")]),
            ("Lag in records", "none", [("", "", "lag_records", "")]),
            ("Rows per second of batch time", "cps", [("", "", "rows_per_second", "")]),
            ("Batches", "cps", [("", "rate(", "batches_total", "[$__rate_interval])")]),
            ("Duration of a batch", "s", [("", "", "batch_seconds", "")]),
            ("Records", "cps", [(" read", "rate(", "read_total", "[$__rate_interval])"),
                                (" written", "rate(", "out_total", "[$__rate_interval])")]),
            ("Records that were not written", "cps", [
                (" dead", "rate(", "dead_total", "[$__rate_interval])"),
                (" late", "rate(", "late_total", "[$__rate_interval])"),
                (" filtered", "rate(", "filtered_total", "[$__rate_interval])"),
                (" duplicate", "rate(", "duplicates_total", "[$__rate_interval])")]),
            ("State", "none", [(" rows", "", "state_rows", "")]),
            ("Restarts", "none", [("", "increase(", "restarts_total", "[$__rate_interval])")]),
        )
    ],
}  # fmt: skip
TITLES: Final = {
    "node": "penstock node",
    "mqtt": "penstock MQTT",
    "state-store": "penstock state store",
    "tubemq": "penstock TubeMQ",
    "pipelines": "penstock pipelines",
}


def render(name: str) -> str:
    """Return the JSON model of a dashboard."""
    source = {"type": "prometheus", "uid": "${source}"}
    selector = ""
    variables: list[dict[str, Any]] = [
        {"name": "source", "label": "Data source", "type": "datasource", "query": "prometheus"}
    ]
    if name != "pipelines":
        selector = '{instance=~"$instance"}'
        query = "label_values(penstock_node_ready, instance)"
        variables.append(
            {"name": "instance", "label": "Node", "type": "query", "datasource": source, "query": query, "refresh": 2,
             "multi": True, "includeAll": True, "current": {"text": "All", "value": "$__all"}}
        )  # fmt: skip
    panels: list[dict[str, Any]] = [
        {
            "id": number,
            "title": panel.title,
            "type": "timeseries",
            "datasource": source,
            "gridPos": {"x": (number - 1) * WIDTH % 24, "y": (number - 1) // 3 * HEIGHT, "w": WIDTH, "h": HEIGHT},
            "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
            "targets": [
                {
                    "refId": chr(ord("A") + index),
                    "expr": expression.replace("@", selector),
                    "legendFormat": legend.strip() if name == "pipelines" else f"{{{{instance}}}} {legend.strip()}",
                }
                for index, (legend, expression) in enumerate(panel.series.items())
            ],
        }
        for number, panel in enumerate(DASHBOARDS[name], 1)
    ]
    model = {
        "uid": f"penstock-{name}",
        "title": TITLES[name],
        "tags": ["penstock"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "links": [{"type": "dashboards", "title": "penstock", "tags": ["penstock"], "asDropdown": True}],
        "templating": {"list": variables},
        "panels": panels,
    }
    return json.dumps(model, indent=1) + "\n"


if __name__ == "__main__":
    for each in DASHBOARDS:
        (FOLDER / f"{each}.json").write_text(render(each), encoding="utf-8")
