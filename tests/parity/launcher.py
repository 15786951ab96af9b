#!/usr/bin/env python3
"""What llama.cpp's server tests start in place of llama-server: the server under test, with a model that is here.

The tests name models by their repository on the hub. The launcher puts a local file in their place and becomes the
server; every other flag goes on as it came. It needs nothing but Python, as the tests start it by its path.

Environment:
    PARITY_SERVER: the path of a llama-server, or ``paceline``.
    PARITY_MODEL: the GGUF that stands for every text model.
    PARITY_EMBEDDER: the GGUF that stands for every embedding model, if given.
    PARITY_RERANKER: the GGUF that stands for every reranker, if given.
    PARITY_PYTHON: the interpreter that has paceline; the launcher's own if not given.
    PARITY_RECORD: a file that gets one line of JSON with the flags of each start, if given.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

# Repositories whose models are small text models: one text model can stand for another.
TEXT_MODELS = (
    "ggml-org/test-model-stories260K",
    "ggml-org/test-model-stories260K-infill",
    "ggml-org/stories15M_MOE",
)
# The models that the tests of llama-server's router name: the text model stands for each.
ROUTED_MODELS = (
    "ggml-org/tinygemma3-GGUF:Q8_0",
    "ggml-org/test-model-stories260K:F32",
    "ggml-org/test-model-stories260K-infill:F32",
)
# Models that the slow cases name, and the template of each, as a beginning of its name and a file of llama.cpp's: the
# text model stands for these too, and writes as they do.
NAMED_MODELS = {
    "bartowski/Meta-Llama-3.1-8B-Instruct-": "meta-llama-Llama-3.1-8B-Instruct",
    "bartowski/Llama-3.2-": "meta-llama-Llama-3.2-3B-Instruct",
    "bartowski/gemma-2-2b-it-": "google-gemma-2-2b-it",
    "bartowski/Phi-3.5-mini-instruct-": "microsoft-Phi-3.5-mini-instruct",
    "bartowski/Qwen2.5-": "Qwen-Qwen2.5-7B-Instruct",
    "bartowski/Hermes-2-Pro-Llama-3-8B-": "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
    "bartowski/Hermes-3-Llama-3.1-8B-": "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
    "bartowski/functionary-small-v3.2-": "meetkai-functionary-medium-v3.2",
    "bartowski/DeepSeek-R1-Distill-Qwen-7B-": "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
}
# Where the tests find llama.cpp's templates from the folder that they start servers in.
TEMPLATES = "../../../models/templates"
# What no text model can stand for.
OTHER_KINDS = ("--embedding", "--reranking", "--mmproj-url")
# Models that stand for those of these kinds, where the environment names some.
OTHER_MODELS = {"--embedding": "PARITY_EMBEDDER", "--reranking": "PARITY_RERANKER"}


class _HealthOnly(BaseHTTPRequestHandler):
    """Say that a server is there, and that there is nothing to ask of this one."""

    def do_GET(self) -> None:
        self._answer(200, {"status": "ok"}) if self.path == "/health" else self._refuse()

    def do_POST(self) -> None:
        self._refuse()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it
        """Stay silent: the tests ask for /health a hundred times a second."""

    def _refuse(self) -> None:
        message = "This launcher has no model for the preset, and answers /health alone"
        self._answer(501, {"error": {"code": 501, "message": message, "type": "not_supported_error"}})

    def _answer(self, status: int, body: object) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def with_local_model(flags: list[str], model: str, others: dict[str, str] | None = None) -> list[str] | None:
    """Return ``flags`` with ``model`` in place of a model of the hub, or that of ``others`` for one of their flags.

    Returns:
        The flags; None for a server that no text model can stand for.
    """
    kept: list[str] = []
    repository, local = None, False
    given = iter(flags)
    for flag in given:
        if flag == "--hf-repo":
            repository = next(given)
        elif flag == "--hf-file":
            next(given)
        elif flag != "--offline":
            local = local or flag == "--model"
            kept.append(flag)
    kind = next((flag for flag in OTHER_KINDS if flag in flags), None)
    if kind is not None:
        other = (others or {}).get(kind)
        return None if other is None else [*kept, "--model", other]
    if repository is None:
        if local:
            return kept
        # llama-server without a model is a router. Tests of allowed origins start one only to ask for headers.
        if "--cors-origins" in flags:
            return [*kept, "--model", model]
        return kept if "--models-preset" in kept else [*kept, "--models-preset", _preset(model)]
    if repository in TEXT_MODELS:
        return [*kept, "--model", model]
    template = next((file for name, file in NAMED_MODELS.items() if repository.startswith(name)), None)
    if template is None:
        return None
    has_template = "--chat-template" in kept or "--chat-template-file" in kept
    written = [] if has_template else ["--chat-template-file", f"{TEMPLATES}/{template}.jinja"]
    return [*kept, *written, "--model", model]


def _preset(model: str) -> str:
    """Write the list of a router's models, and return its path. It is left to the system: the launcher goes."""
    with tempfile.NamedTemporaryFile("w", suffix=".ini", prefix="parity-", delete=False) as file:
        file.writelines(f"[{name}]\nmodel = {model}\n" for name in ROUTED_MODELS)
    return file.name


def command(flags: list[str], environment: dict[str, str]) -> list[str]:
    """Return what to execute, its path first."""
    server = environment["PARITY_SERVER"]
    if server != "paceline":
        return [server, *flags]
    # llama-server lets the pages of all origins ask unless it is told otherwise; paceline lets none.
    origins = [] if "--cors-origins" in flags else ["--cors-origins", "*"]
    return [environment.get("PARITY_PYTHON", sys.executable), "-m", "paceline", "serve", *flags, *origins]


def main() -> None:
    """Become the server, or answer /health in its place."""
    others = {flag: os.environ[name] for flag, name in OTHER_MODELS.items() if name in os.environ}
    flags = with_local_model(sys.argv[1:], os.environ["PARITY_MODEL"], others)
    if flags is None:
        port = int(sys.argv[sys.argv.index("--port") + 1])
        HTTPServer(("127.0.0.1", port), _HealthOnly).serve_forever()
        return
    if "PARITY_RECORD" in os.environ:
        with Path(os.environ["PARITY_RECORD"]).open("a") as record:
            record.write(json.dumps({"flags": flags}) + "\n")
    words = command(flags, dict(os.environ))
    os.execv(words[0], words)


if __name__ == "__main__":
    main()
