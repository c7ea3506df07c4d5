"""Test that the rules and the dashboard in docs/monitoring use figures that the daemon has."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from scarctl.daemon.metrics import FAMILIES

DOCS = Path(__file__).parent.parent / "docs"
OF_THE_DAEMON = {"scarctl_start_time_seconds", "scarctl_runs"}
PUBLISHED = {family.name for family in FAMILIES} | OF_THE_DAEMON


def named(expression: str) -> set[str]:
    """Return the names of metrics in an expression, without texts in quotes."""
    return set(re.findall(r"\b(?:scarctl|node)_\w+", re.sub(r'"[^"]*"', "", expression)))


def test_the_table_has_the_published_figures() -> None:
    text = (DOCS / "metrics.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(scarctl_\w+)` \|", text, re.MULTILINE)) == PUBLISHED


def test_counters_are_named_as_counters_and_units_are_in_the_names() -> None:
    for family in FAMILIES:
        assert (family.kind == "counter") == family.name.endswith("_total"), family.name
        assert family.help.endswith(".")


def test_alerts_ask_for_figures_that_there_are() -> None:
    (group,) = yaml.safe_load((DOCS / "monitoring" / "alerts.yml").read_text())["groups"]
    assert len({rule["alert"] for rule in group["rules"]}) == len(group["rules"]) >= 5
    for rule in group["rules"]:
        assert named(rule["expr"])
        assert named(rule["expr"]) <= PUBLISHED | {"node_textfile_mtime_seconds"}
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"].keys() == {"summary", "description"}


def test_the_dashboard_asks_for_figures_that_there_are() -> None:
    board: dict[str, Any] = json.loads((DOCS / "monitoring" / "grafana.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked += [one["query"] for one in board["templating"]["list"] if one["type"] == "query"]
    assert len(asked) > 8
    for expression in asked:
        assert named(expression)
        assert named(expression) <= PUBLISHED
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


GRID = 24
"""Columns of a dashboard."""
UNITS = {"none", "short", "bytes", "s", "Bps", "percentunit"}
"""Grafana's units that a figure of scarctl can have."""


def test_the_dashboard_keeps_to_grafanas_json_model() -> None:
    """It checks the rules of Grafana's documentation for a dashboard, not its drawing."""
    board: dict[str, Any] = json.loads((DOCS / "monitoring" / "grafana.json").read_text())
    assert isinstance(board["schemaVersion"], int)
    assert "id" not in board, "Grafana gives the number: with one, an import may replace another dashboard"
    assert 0 < len(board["uid"]) <= 40
    assert board["time"].keys() == {"from", "to"}
    variables = {one["name"]: one for one in board["templating"]["list"]}
    (source,) = [name for name, one in variables.items() if one["type"] == "datasource"]
    assert variables[source]["query"] == "prometheus"
    asking = [one for one in variables.values() if one["type"] == "query"]
    cells: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        assert panel["type"] in ("timeseries", "stat", "table")
        assert panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
        place = panel["gridPos"]
        taken = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert taken
        assert not taken & cells, f"{panel['title']} lies on another panel"
        assert max(x for x, _ in taken) < GRID
        cells |= taken
        letters = [target["refId"] for target in panel["targets"]]
        assert len(set(letters)) == len(letters)
        for target in panel["targets"]:
            assert set(re.findall(r"\$\{?(\w+)", target["expr"])) <= {*variables, "__rate_interval"}
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= {"store", "rank"}
    for one in [*board["panels"], *asking]:
        assert one["datasource"] == {"type": "prometheus", "uid": f"${{{source}}}"}


def dropped(given: Any, kept: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of values that are missing or different in `kept`."""
    if isinstance(given, dict) and isinstance(kept, dict):
        for key, value in given.items():
            yield from dropped(value, kept.get(key), f"{path}.{key}")
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        for index, (one, other) in enumerate(zip(given, kept, strict=True)):
            yield from dropped(one, other, f"{path}[{index}]")
    elif given != kept:
        yield path


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Grafana's package needs Python 3.11")
def test_grafanas_own_model_knows_all_of_the_dashboard() -> None:
    """Read by Grafana's package for dashboards and written again, it is the same: a misspelt field is dropped."""
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    board: dict[str, Any] = json.loads((DOCS / "monitoring" / "grafana.json").read_text())

    def again() -> dict[str, Any]:
        return json.loads(json.dumps(Dashboard.from_json(board), cls=JSONEncoder))

    assert list(dropped(board, again())) == []
    board["panels"][0]["targets"][0]["expression"] = board["panels"][0]["gridPos"]["width"] = 1
    assert set(dropped(board, again())) == {".panels[0].targets[0].expression", ".panels[0].gridPos.width"}
