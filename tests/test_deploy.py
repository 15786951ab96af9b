"""What ``deploy`` has names only metrics, options and variables that there are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.core.fields import fields_of
from paceline.environment import variables_of_the_table
from paceline.server_options import ServerOptions
from paceline.serving.metrics import FAMILIES

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"

_NAME = re.compile(r"\b(?:vllm|llamacpp|paceline):\w+")
_LABELS = re.compile(r"\bby \(([^)]*)\)")


def dashboard_expressions() -> list[str]:
    panels: list[dict[str, Any]] = json.loads((DEPLOY / "dashboard.json").read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def alert_expressions() -> list[str]:
    # One expression is the indented lines below its key.
    return re.findall(r"expr: >\n((?: {10}.*\n)+)", (DEPLOY / "alerts.yaml").read_text())


@pytest.mark.parametrize("expression", [*dashboard_expressions(), *alert_expressions()])
def test_expressions_name_metrics_and_labels_that_there_are(expression: str) -> None:
    families = {family.name: family for family in FAMILIES}
    names = {name.removesuffix("_bucket") for name in _NAME.findall(expression)}
    assert names
    assert names <= families.keys()
    labels = {label.strip() for found in _LABELS.findall(expression) for label in found.split(",")}
    own = {label for name in names for label in families[name].labels}
    assert labels <= own | {"instance", "le"}


def test_two_alerts_are_read() -> None:
    assert len(alert_expressions()) == 2


def test_variables_are_those_of_options() -> None:
    known = {*variables_of_the_table(), "PACELINE_CACHE"}
    names = ("Dockerfile", "compose.yaml", "paceline.service", "kubernetes/base/kustomization.yaml")
    texts = [(DEPLOY / name).read_text() for name in names]
    named = set(re.findall(r"\bPACELINE_[A-Z_]+", "\n".join(texts)))
    assert {"PACELINE_HOST", "PACELINE_API_KEY", "PACELINE_MODEL"} <= named
    assert named <= known


def test_the_image_has_all_that_make_installs_from(tmp_path: Path) -> None:
    """A file that the build needs, and that is kept out of it, shows as a rule that ``make`` lacks."""
    lines = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    kept = [line[1:] for line in lines if line.startswith("!")]
    for name in kept:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tmp_path / name)
    made = subprocess.run(
        ["make", "--dry-run", ".venv/.installed"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    # What a wheel is built from by hatchling is named in the project's file.
    project = (ROOT / "pyproject.toml").read_text()
    for name in re.findall(r'(?:readme = |license-files = \[|path = )"([^"]+)"', project):
        assert any(fnmatch(name, pattern) or name.startswith(f"{pattern}/") for pattern in kept), name


BASE = DEPLOY / "kubernetes" / "base"


def resources(name: str) -> dict[str, dict[str, Any]]:
    """Return what a file of ``deploy/kubernetes/base`` says of each kind of resource."""
    return {each["kind"]: each for each in yaml.safe_load_all((BASE / name).read_text())}


def pod_of(name: str, kind: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, str], dict[str, int]]:
    """Return the pod of a resource, its container, the options of this one by their flags, and its ports by name."""
    pod = resources(name)[kind]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    words = [word for argument in container["args"] for word in argument.split("=", 1)]
    options = {word: value for word, value in zip(words, [*words[1:], ""], strict=True) if word.startswith("--")}
    return pod, container, options, {port["name"]: port["containerPort"] for port in container["ports"]}


def test_each_kustomization_names_what_lies_beside_it() -> None:
    for file in (DEPLOY / "kubernetes").rglob("kustomization.yaml"):
        listed = yaml.safe_load(file.read_text())
        beside = {path.name for path in file.parent.glob("*.yaml")} - {file.name}
        named = [*listed["resources"], *(patch["path"] for patch in listed.get("patches", ()))]
        assert beside <= set(named)
        assert all((file.parent / name).exists() for name in named)


def test_replicas_are_what_the_gateway_looks_for() -> None:
    server, _, of_server, ports = pod_of("server.yaml", "StatefulSet")
    gateway, _, of_gateway, own_ports = pod_of("gateway.yaml", "Deployment")
    labels = server["metadata"]["labels"]
    assert of_gateway["--selector"] == ",".join(f"{name}={value}" for name, value in labels.items())
    assert of_gateway["--service-discovery-port"] == of_server["--port"] == str(ports["http"])
    listens = [of_gateway[name] for name in ("--port", "--health-check-port", "--prometheus-port")]
    assert listens == [str(own_ports[name]) for name in ("http", "health", "metrics")]
    kinds = resources("server.yaml")
    selected = [kinds["Service"]["spec"]["selector"], kinds["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]]
    selected += [kinds[kind]["spec"]["selector"]["matchLabels"] for kind in ("StatefulSet", "PodDisruptionBudget")]
    selected += [each["labelSelector"]["matchLabels"] for each in server["spec"]["topologySpreadConstraints"]]
    assert selected == [labels] * 5
    allowed = [each["podSelector"]["matchLabels"] for each in kinds["NetworkPolicy"]["spec"]["ingress"][0]["from"]]
    assert gateway["metadata"]["labels"] in allowed
    known = {flag for field in fields_of(ServerOptions) for flag in field.flags}
    assert of_server.keys() <= known


def test_nobody_ends_a_server_that_loads_or_a_pod_that_answers() -> None:
    server, container, of_server, _ = pod_of("server.yaml", "StatefulSet")
    gateway, _, of_gateway, _ = pod_of("gateway.yaml", "Deployment")
    # The server flushes for a second, and frees the model within five more.
    assert server["spec"]["terminationGracePeriodSeconds"] > float(of_server["--grace"]) + 6
    assert gateway["spec"]["terminationGracePeriodSeconds"] > float(of_gateway["--shutdown-grace-period-secs"])
    assert float(of_gateway["--shutdown-grace-period-secs"]) >= float(of_server["--grace"])
    startup, ready, live = (container[f"{name}Probe"] for name in ("startup", "readiness", "liveness"))
    assert {probe["httpGet"]["path"] for probe in (startup, ready, live)} == {"/health"}
    waits = [probe["periodSeconds"] * probe["failureThreshold"] for probe in (startup, ready, live)]
    # As long as the container's own check waits at its start.
    (start_period,) = re.findall(r"--start-period=(\d+)m", (DEPLOY / "Dockerfile").read_text())
    assert waits[0] >= int(start_period) * 60
    assert waits[1] < waits[2]


def test_the_gateway_is_the_version_that_is_tested() -> None:
    (tested,) = re.findall(r"'smg==([\d.]+)'", (ROOT / "Makefile").read_text())
    dockerfile = (DEPLOY / "kubernetes" / "gateway.Dockerfile").read_text()
    tag = yaml.safe_load((BASE / "kustomization.yaml").read_text())["images"][1]["newTag"]
    assert re.findall(r"smg[=-]+([\d.]+\d)", dockerfile + tag) == [tested] * 3


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    unit = (DEPLOY / "paceline.service").read_text()
    # A program that is there.
    unit, programs = re.subn(
        r"^ExecStart=/opt/paceline/.venv/bin/paceline serve", "ExecStart=/bin/true", unit, flags=re.M
    )
    assert programs == 1
    (tmp_path / "paceline.service").write_text(unit)
    verified = subprocess.run(
        ["systemd-analyze", "verify", "--recursive-errors=no", str(tmp_path / "paceline.service")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (verified.returncode, verified.stdout, verified.stderr) == (0, "", "")
