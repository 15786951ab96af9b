"""The gateway of deploy/kubernetes finds servers by the Kubernetes API: here one that has a single pod to tell of."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import yaml

from tests.gateway.test_gateway import MODEL, free_port
from tests.serving.processes import poll, served
from tests.timing import WAIT_S

BASE = Path(__file__).parents[2] / "deploy" / "kubernetes" / "base"
NAMESPACE = "somewhere"


def resources(name: str) -> dict[str, dict[str, Any]]:
    """Return the resources of a file, by their kinds."""
    return {each["kind"]: each for each in yaml.safe_load_all((BASE / name).read_text())}


@contextmanager
def cluster(folder: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield how a cluster is reached whose one pod has the labels of a replica, and what it is asked for."""
    labels = resources("server.yaml")["StatefulSet"]["spec"]["template"]["metadata"]["labels"]
    asked: list[str] = []
    over = threading.Event()

    class Api(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            query = parse_qs(url.query)
            asked.append(f"{'watch' if 'watch' in query else 'list'} {url.path}")
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            if "watch" in query:
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                self.wfile.flush()
                over.wait()
                return
            name, _, value = query["labelSelector"][0].partition("=")
            metadata = {"name": "one", "namespace": NAMESPACE, "uid": "one", "labels": labels, "resourceVersion": "1"}
            status = {
                "phase": "Running",
                "podIP": "127.0.0.1",
                "conditions": [{"type": "Ready", "status": "True"}],
            }
            pod = {"metadata": metadata, "spec": {"containers": [{"name": "one"}]}, "status": status}
            items = [pod] if labels.get(name) == value else []
            body = json.dumps(
                {"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": items}
            ).encode()
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - as http.server has it
            pass

    api = ThreadingHTTPServer(("127.0.0.1", 0), Api)
    api.daemon_threads = True
    thread = threading.Thread(target=api.serve_forever)
    thread.start()
    named = {
        "clusters": [{"name": "one", "cluster": {"server": f"http://127.0.0.1:{api.server_port}"}}],
        "users": [{"name": "one", "user": {}}],
        "contexts": [{"name": "one", "context": {"cluster": "one", "user": "one"}}],
        "current-context": "one",
    }
    (folder / "kubeconfig").write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Config", **named}))
    try:
        yield folder / "kubeconfig", asked
    finally:
        over.set()
        api.shutdown()
        thread.join()
        api.server_close()


def test_the_gateway_finds_replicas_and_tells_that_it_is_well(gateway_program: str, tmp_path: Path) -> None:
    (container,) = resources("gateway.yaml")["Deployment"]["spec"]["template"]["spec"]["containers"]
    own = {each["name"]: str(free_port()) for each in container["ports"]}
    with served("-np", "1", "-t", "1") as server, cluster(tmp_path) as (kubeconfig, asked):
        given = {name: value for name, _, value in (each.partition("=") for each in container["args"])}
        here = {
            "--host": "127.0.0.1",
            "--port": own["http"],
            "--prometheus-host": "127.0.0.1",
            "--prometheus-port": own["metrics"],
            "--health-check-port": own["health"],
            "--service-discovery-namespace": NAMESPACE,
            "--service-discovery-port": server.url.rpartition(":")[2],
        }
        assert here.keys() < given.keys()
        arguments = [f"{name}={value}" if value else name for name, value in {**given, **here}.items()]
        with (tmp_path / "log").open("wb") as said:
            environment = {**os.environ, "KUBECONFIG": str(kubeconfig)}
            process = subprocess.Popen(
                [gateway_program, *arguments], stdout=said, stderr=said, cwd=tmp_path, env=environment
            )

        def is_found() -> bool:
            assert process.poll() is None, (tmp_path / "log").read_text()
            try:
                listed = httpx.get(f"http://127.0.0.1:{own['http']}/workers", timeout=WAIT_S).json()["workers"]
                return [each["url"] for each in listed if each["is_healthy"]] == [server.url]
            except (httpx.TransportError, ValueError):
                return False

        try:
            poll(is_found)
            answer = httpx.post(
                f"http://127.0.0.1:{own['http']}/v1/completions",
                json={"model": MODEL, "prompt": "def f(x):", "max_tokens": 4},
                timeout=WAIT_S,
            )
            assert answer.json()["usage"]["completion_tokens"] == 4
            for probe in ("readinessProbe", "livenessProbe"):
                asks = container[probe]["httpGet"]
                assert httpx.get(f"http://127.0.0.1:{own[asks['port']]}{asks['path']}", timeout=WAIT_S).is_success
        finally:
            process.kill()
            process.wait()
    # What the Role allows is enough.
    (rule,) = resources("gateway.yaml")["Role"]["rules"]
    assert {each.partition(" ")[0] for each in asked} <= set(rule["verbs"])
    assert {each.partition(" ")[2] for each in asked} == {f"/api/v1/namespaces/{NAMESPACE}/pods"}
