"""What ``kubectl apply -k`` would send is what Kubernetes' schemas allow.

``make test-kubernetes`` installs the schemas (kubernetes-validate). It needs kubectl, and no cluster.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

MANIFESTS = Path(__file__).parents[2] / "deploy" / "kubernetes"
VERSIONS = ("1.30", "1.37")
"""The oldest and the newest that are looked at."""


@pytest.fixture
def validator(request: pytest.FixtureRequest) -> str:
    return str(request.config.getoption("--kubernetes"))


def rendered(name: str) -> str:
    """Return the resources of a kustomization, as kubectl puts them together."""
    command = ["kubectl", "kustomize", str(MANIFESTS / name)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def faults(validator: str, resources: str, version: str, folder: Path) -> list[str]:
    """Return what a version of Kubernetes would refuse; fields that it does not know among it."""
    (folder / "resources.yaml").write_text(resources)
    command = [validator, "--strict", "--kubernetes-version", version, str(folder / "resources.yaml")]
    looked = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = (looked.stdout + looked.stderr).splitlines()
    passed = [line for line in lines if " passed for resource " in line]
    assert len(passed) == resources.count("\nkind: ") or looked.returncode, lines
    return [line for line in lines if line not in passed]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", ["base", "gpu"])
def test_schemas_accept_what_would_be_applied(validator: str, name: str, version: str, tmp_path: Path) -> None:
    assert faults(validator, rendered(name), version, tmp_path) == []


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("terminationGracePeriodSeconds: 150", "terminationGracePeriodSeconds: soon"),
        ("podManagementPolicy:", "podManagementPolitics:"),
        ("path: /health", "paths: /health"),
    ],
)
def test_schemas_refuse_a_slip(validator: str, right: str, wrong: str, tmp_path: Path) -> None:
    resources = rendered("base")
    assert right in resources
    assert faults(validator, resources.replace(right, wrong), VERSIONS[-1], tmp_path)


def test_a_gpu_is_asked_for_by_each_replica() -> None:
    resources = rendered("gpu")
    assert resources.count("nvidia.com/gpu: 1") == 1
    assert "image: paceline:cuda" in resources
