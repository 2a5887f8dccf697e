"""What deploy/ holds is what the server understands: settings, paths, metrics, and times that fit each other."""

from __future__ import annotations

import asyncio
import configparser
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import kubernetes_validate
import msgspec
import pytest
import yaml

from novainfer import EngineConfig
from novainfer.server.app import ROUTES
from novainfer.server.cli import serve as cli_serve
from novainfer.server.cli.main import main
from novainfer.server.cli.options import unknown_variables
from novainfer.server.keys.ring import PUBLIC_PATHS
from novainfer.server.serve import ALIVE_CHECK_S, FLUSH_TIMEOUT_S
from novainfer.server.settings import ServerSettings
from tests.server.conftest import running
from tests.server.fakes import FakeEngine, FakeStatistics

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
# What stopping takes beside the drain: the engine's own end of it, twice for connections, and a second to spare.
CLOSING_S = 3 * FLUSH_TIMEOUT_S + ALIVE_CHECK_S + 1


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def of_kind(kind: str) -> dict[str, Any]:
    (found,) = [one for name in MANIFESTS for one in documents(name) if one["kind"] == kind]
    return found


MANIFESTS = ("kubernetes.yaml", "leaderworkerset.yaml")
PODS = ("Deployment", "LeaderWorkerSet")


def pod_of(kind: str) -> dict[str, Any]:
    spec = of_kind(kind)["spec"]
    template = spec["template"] if kind == "Deployment" else spec["leaderWorkerTemplate"]["workerTemplate"]
    return template["spec"]  # type: ignore[no-any-return]


@pytest.fixture
def settings_in_configmap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[EngineConfig, ServerSettings]:
    """What the file of the ConfigMap makes of a server."""
    found: list[Any] = []
    monkeypatch.setattr(cli_serve, "make_engine", found.append)
    monkeypatch.setattr(
        "novainfer.server.serve.run_server", lambda settings, make: (make(), found.append(settings), 0)[2]
    )
    file = tmp_path / "novainfer.yaml"
    file.write_text(of_kind("ConfigMap")["data"]["novainfer.yaml"])
    assert main(["serve", "--config", str(file)]) == 0
    config, settings = found
    return config, settings


# ---- Kubernetes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_are_as_their_schemas_say(name: str) -> None:
    for document in documents(name):
        if document["apiVersion"].startswith("leaderworkerset"):
            continue  # its schema is the cluster's
        kubernetes_validate.validate(document, "1.31", strict=True)


@pytest.mark.parametrize("kind", PODS)
def test_the_grace_period_holds_pre_stop_drain_and_closing(
    kind: str, settings_in_configmap: tuple[EngineConfig, ServerSettings]
) -> None:
    pod = pod_of(kind)
    (container,) = pod["containers"]
    program, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "sleep"
    needed_s = float(seconds) + settings_in_configmap[1].shutdown_timeout_s + CLOSING_S
    assert needed_s <= pod["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("kind", PODS)
def test_probes_ask_for_what_is_served_without_a_key_and_know_life_from_readiness(kind: str) -> None:
    (container,) = pod_of(kind)["containers"]
    (port,) = container["ports"]
    paths = {name: container[name]["httpGet"]["path"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert paths == {"startupProbe": "/readyz", "readinessProbe": "/readyz", "livenessProbe": "/livez"}
    served = {(route.method, route.path) for route in ROUTES}
    for name, path in paths.items():
        assert ("GET", path) in served
        assert path in PUBLIC_PATHS
        assert container[name]["httpGet"]["port"] == port["name"]


@pytest.mark.parametrize("kind", PODS)
def test_pods_have_no_root_no_service_links_and_a_disk_only_where_they_write(kind: str) -> None:
    pod = pod_of(kind)
    (container,) = pod["containers"]
    assert pod["enableServiceLinks"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    volumes = {volume["name"] for volume in pod["volumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == volumes
    assert {"/tmp", "/var/lib/novainfer"} <= set(mounts.values())
    assert container["args"][-1].startswith(mounts["config"] + "/")
    assert container["args"][-1].rpartition("/")[2] in of_kind("ConfigMap")["data"]


def test_what_belongs_together_has_the_same_labels() -> None:
    deployment, labels = of_kind("Deployment")["spec"], of_kind("Service")["spec"]["selector"]
    assert labels == deployment["selector"]["matchLabels"] == deployment["template"]["metadata"]["labels"]
    assert labels == of_kind("PodDisruptionBudget")["spec"]["selector"]["matchLabels"]
    group = of_kind("LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
    assert labels == group["workerTemplate"]["metadata"]["labels"]
    assert (group["restartPolicy"], group["size"]) == ("None", 1)
    (port,) = of_kind("Service")["spec"]["ports"]
    assert port["targetPort"] == pod_of("Deployment")["containers"][0]["ports"][0]["name"]


# ---- images ----------------------------------------------------------------------------------------------------------


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"\\\n\s*", " ", (DEPLOY / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def stages() -> dict[str, list[tuple[str, str]]]:
    """The instructions of each stage, those of the stage that it begins with among them."""
    found: dict[str, list[tuple[str, str]]] = {}
    name = ""
    for word, rest in instructions():
        if word == "FROM":
            source, _, name = rest.partition(" AS ")
            found[name] = list(found.get(source, []))
        elif name:
            found[name].append((word, rest))
    return found


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_an_image_runs_without_root_is_asked_for_its_health_and_stops_by_a_signal_that_drains(target: str) -> None:
    stage = stages()[target]
    assert [rest for word, rest in stage if word == "USER"][-1] == "10001:10001"
    health = [rest for word, rest in stage if word == "HEALTHCHECK"][-1]
    (path,) = re.findall(r"\]\}(/\w+)'", health)
    assert path in PUBLIC_PATHS
    assert ("STOPSIGNAL", "SIGTERM") in stage
    assert ("ENTRYPOINT", '["novainfer"]') in stage
    copied = [rest for word, rest in stage if word == "COPY"]
    assert copied == [f"--from=build-{target} /opt/novainfer /opt/novainfer"]  # no source, no compiler's leavings
    assert list(stages())[-1] == "cpu", "what is built where no target is named"


def test_variables_of_images_and_compose_are_settings() -> None:
    names = set(re.findall(r"NOVAINFER_\w+", (DEPLOY / "Dockerfile").read_text()))
    names |= set(re.findall(r"NOVAINFER_\w+", (DEPLOY / "compose.yaml").read_text()))
    assert names
    assert unknown_variables(dict.fromkeys(names, "1")) == []


def test_every_room_is_in_the_image_and_what_it_is_packed_with() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    rooms = set(project["tool"]["setuptools"]["package-dir"].values())
    files = {*project["project"]["license-files"], project["project"]["readme"], "pyproject.toml"}
    assert rooms | files <= allowed
    assert all((ROOT / name).exists() for name in allowed)
    assert set(project["project"]["optional-dependencies"]) >= {"tls", "otel"}


def test_compose_waits_for_the_drain_and_names_stages() -> None:
    (compose,) = documents("compose.yaml")
    for service in compose["services"].values():
        assert service["build"]["target"] in stages()
        drain_s = float(service["environment"]["NOVAINFER_SHUTDOWN_TIMEOUT"])
        assert drain_s + CLOSING_S <= float(service["stop_grace_period"].removesuffix("s"))
        assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).resolve().is_file()


# ---- systemd ---------------------------------------------------------------------------------------------------------


def test_the_unit_waits_for_ready_and_for_the_drain_and_starts_nothing_again_in_vain() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(DEPLOY / "novainfer.service")
    service = unit["Service"]
    assert service["Type"] == "notify"
    assert service["KillMode"] == "mixed"  # the worker's process is the server's to end
    assert service["RestartPreventExitStatus"] == "2"
    assert service["ExecReload"] == "/bin/kill -HUP $MAINPID"
    assert ServerSettings().shutdown_timeout_s + CLOSING_S <= float(service["TimeoutStopSec"].removesuffix("s"))
    assert float(service["WatchdogSec"].removesuffix("s")) > 10 * ALIVE_CHECK_S


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is part of systemd")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "novainfer.service").read_text().replace("/opt/novainfer/bin/novainfer", sys.executable)
    (tmp_path / "novainfer.service").write_text(text)
    command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / "novainfer.service")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    ours = [line for line in done.stderr.splitlines() if "novainfer.service" in line]
    assert (done.returncode, ours) == (0, [])


# ---- Prometheus and Grafana ------------------------------------------------------------------------------------------

METRIC = re.compile(r"\b(?:vllm:|nova_|process_)\w+")


def queries() -> Iterator[tuple[str, str]]:
    """What the dashboard and the alerts ask Prometheus, each with where it stands."""
    dashboard = json.loads((DEPLOY / "dashboard.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    (alerts,) = documents("alerts.yaml")
    for group in alerts["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


class Busy(FakeEngine):
    """An engine whose queue has been long enough for it to know how fast it drains."""

    def statistics(self) -> FakeStatistics:
        found = super().statistics()
        admission = msgspec.structs.replace(found.admission, drain_rate_per_s=2.0)
        return msgspec.structs.replace(found, admission=admission)


@pytest.fixture(scope="module")
def scraped() -> tuple[set[str], str]:
    """The names of samples that a server exports, and the whole text; with what is only there once it has happened."""

    async def scrape() -> str:
        async with running(Busy()) as server, httpx.AsyncClient(base_url=server.url) as client:
            body = {"messages": [{"role": "user", "content": "hi"}]}
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
            return (await client.get("/metrics")).text

    text = asyncio.run(scrape())
    names = set(re.findall(r"^([a-zA-Z_:][\w:]*)(?:\{| )", text, re.MULTILINE))
    # Families whose samples have labels that are only there once they have happened.
    kinds = dict(re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE))
    return names | set(kinds), text


def test_dashboard_and_alerts_name_metrics_that_are_exported(scraped: tuple[set[str], str]) -> None:
    names, _ = scraped
    asked = {(where, name) for where, query in queries() for name in METRIC.findall(query)}
    assert len({name for _, name in asked}) > 25
    missing = {(where, name) for where, name in asked if name not in names}
    assert not missing


def test_queries_select_and_group_by_labels_that_exist(scraped: tuple[set[str], str]) -> None:
    _, text = scraped
    known = set(re.findall(r'[{,](\w+)="', text)) | {"instance", "job", "le"}
    known |= {"kind", "cause", "reason", "finished_reason"}  # of what has not happened here (docs/metrics.md)
    for where, query in queries():
        used = set(re.findall(r"(\w+)=[~\"]", query))
        for group in re.findall(r"by \(([^)]*)\)", query):
            used |= {name.strip() for name in group.split(",")}
        assert used <= known, where


def test_queries_are_balanced_and_panels_do_not_overlap() -> None:
    for where, query in queries():
        assert all(query.count(a) == query.count(b) for a, b in ("()", "{}", "[]")), where
    dashboard = json.loads((DEPLOY / "dashboard.json").read_text())
    places: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & places, panel["title"]
        places |= cells
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_each_alert_says_how_bad_it_is_and_what_to_do() -> None:
    (alerts,) = documents("alerts.yaml")
    for rule in alerts["groups"][0]["rules"]:
        assert rule["labels"]["severity"] in ("critical", "warning"), rule["alert"]
        assert set(rule["annotations"]) == {"summary", "description"}
