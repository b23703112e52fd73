"""The board, the alerts and the configuration of deploy/: they load, and the server has every metric that they name."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from fake_engine import FakeEngine
from prometheus_client.parser import text_string_to_metric_families as families
from starlette.testclient import TestClient
from tokenizers_made import byte_level

from hf_sparsekv_serve.http import create_app

DEPLOY = Path(__file__).parents[2] / "deploy"
OF_LABELS = {"instance", "job"}  # that Prometheus adds
WORDS = re.compile(r"[a-z_]\w*")
FUNCTIONS = {"sum", "by", "rate", "increase", "histogram_quantile", "min", "label_values", "without"}


@pytest.fixture(scope="module")
def metrics() -> dict[str, set[str]]:
    """The samples of a server that has answered, by name, and their labels."""
    with FakeEngine(byte_level()) as engine:
        client = TestClient(create_app(engine, "m"), base_url="http://localhost")
        assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200
        engine.refused["waiting"] = 1
        found: dict[str, set[str]] = {}
        for family in families(client.get("/metrics").text):
            found.setdefault(family.name, set())
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
            if family.type == "counter" and not family.samples:  # of sparse prompts, which this engine has not
                found.setdefault(f"{family.name}_total", {"layer", "head"})
    return found


def board() -> dict:
    return json.loads((DEPLOY / "grafana.json").read_text())


def rules() -> list[dict]:
    (group,) = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"]
    return group["rules"]


def expressions() -> list[str]:
    panels = [panel for panel in board()["panels"] if panel["type"] != "row"]
    asked = [target["expr"] for panel in panels for target in panel["targets"]]
    variables = [one["query"]["query"] for one in board()["templating"]["list"] if one["type"] == "query"]
    return [*asked, *variables, *(rule["expr"] for rule in rules())]


@pytest.mark.parametrize("expression", expressions())
def test_every_metric_and_label_is_the_servers(metrics, expression):
    names = set(re.findall(r"hf_sparsekv_\w+", expression))
    assert names and names <= metrics.keys(), names - metrics.keys()
    known = set().union(*(metrics[name] for name in names)) | OF_LABELS
    labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", expression))
    for inside in re.findall(r"\bby \(([^)]*)\)", expression):
        labels |= set(re.findall(r"\w+", inside))
    assert labels <= known, labels - known
    rest = re.sub(r"\"[^\"]*\"|\$\w+|\{[^}]*\}|\bby \([^)]*\)|\[[^\]]*\]|\d+[a-z]\b", "", expression)
    assert set(WORDS.findall(rest)) <= names | FUNCTIONS | OF_LABELS


def test_brackets_of_expressions_are_closed():
    for expression in expressions():
        for open, close in ("()", "[]", "{}"):
            assert expression.count(open) == expression.count(close), expression


def test_panels_have_places_of_their_own():
    panels = board()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 15
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
        assert panel["type"] == "row" or (panel["targets"] and panel["fieldConfig"]["defaults"]["unit"])
    variables = {one["name"] for one in board()["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(panels))) - {"__rate_interval"} == variables


def test_prometheus_reads_the_alerts():
    config = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())
    assert all((DEPLOY / name).exists() for name in config["rule_files"])
    assert {job["job_name"] for job in config["scrape_configs"]} == {"hf-sparsekv"}
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names) and all(rule["annotations"]["summary"] for rule in rules())
    assert config["scrape_configs"][0].get("metrics_path", "/metrics") == "/metrics"
