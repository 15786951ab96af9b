"""What a server says of itself: models, properties, places, figures, and the document of its own API."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from typing import Any, Final

import httpx
import pytest

from paceline import __version__
from paceline.core.errors import InputError
from paceline.core.params import SamplingParams
from paceline.server_options import ServerOptions
from paceline.serving.app import Handlers, create_app
from paceline.serving.logs import LOGGER
from paceline.serving.model_host import ModelHost
from paceline.serving.page import page_files
from paceline.serving.security import ApiKeys, SecuritySettings
from paceline.serving.server import Server
from tests.serving.asking import HOME, run
from tests.serving.hosted import NAME, Hosted, hosted, scripted
from tests.serving.scripted import Turnstile, writing_model
from tests.timing import WAIT_S

PUBLIC: Final = {"/health", "/v1/health", "/ping"}
POLLED: Final = PUBLIC | {"/metrics", "/v1/models", "/models", "/props", "/slots", "/load"}


def table(server: Server) -> list[tuple[str, str]]:
    """Return the methods and paths of all routes."""
    routes = Handlers(server).routes()
    return [(method, path) for route in routes for path in route.paths for method in route.methods]


def test_a_model_is_told_in_both_forms() -> None:
    def load() -> Any:
        return replace(scripted(names=("b", "a")), tags=("code", "small"))

    with hosted(load) as running:
        found = running.get("/v1/models").json()
        assert found == running.get("/models").json()
        (data,), (model,) = found["data"], found["models"]
        assert (data["id"], data["aliases"], data["tags"]) == ("a", ["a", "b"], ["code", "small"])
        assert data["meta"]["n_ctx"] == 4096
        assert data["meta"]["n_vocab"] == 260
        assert model["name"] == model["model"] == "a"
        assert model["capabilities"] == ["completion"]
        assert running.get("/v1/models/b").json()["id"] == "b"


def test_the_file_of_a_model_is_told(pair_server: Hosted) -> None:
    meta = pair_server.get("/v1/models").json()["data"][0]["meta"]
    assert meta["n_params"] > 10**6
    assert meta["size"] > 10**6
    assert meta["n_embd"] > 0
    assert meta["ftype"]
    props = pair_server.get("/props").json()
    assert "/" not in props["model_path"]
    assert props["model_path"].endswith(".gguf")


def test_properties_are_the_defaults_of_requests(server: Hosted) -> None:
    props = server.get("/props").json()
    settings, params = props["default_generation_settings"], SamplingParams()
    assert settings["n_ctx"] == 4096
    assert settings["params"]["temperature"] == params.temperature
    assert settings["params"]["seed"] == -1
    assert settings["params"]["n_predict"] == -1
    assert (props["total_slots"], props["model_alias"]) == (16, NAME)
    assert "<|im_start|>" in props["chat_template"]
    assert props["chat_template_caps"]["supports_system_role"] is True
    assert props["eos_token"] == "<|im_end|>"
    assert re.match(r"b\d+-", props["build_info"])
    assert props["build_info"].endswith(__version__)
    assert props["speculative"] == {
        "drafters": ["prediction", "draft", "suffix", "lookup"],
        "policy": "fixed",
        "verify": "coupled",
        "reason": None,
    }
    answer = server.answer("/completion", {"prompt": "a", "n_predict": 1})["generation_settings"]
    assert set(settings["params"]) <= set(answer)


def test_properties_cannot_be_changed(server: Hosted) -> None:
    assert "cannot be changed" in server.refusal("/props", {"n": 1}, 405)["message"]


def test_places_tell_what_is_under_way() -> None:
    gate = Turnstile(writing_model())
    with hosted(lambda: scripted(target=gate, drafts=False, max_sequences=2)) as running:
        idle = running.get("/slots").json()
        assert [(slot["id"], slot["is_processing"], slot["speculative"]) for slot in idle] == [
            (0, False, False),
            (1, False, False),
        ]
        assert running.get("/slots?fail_on_no_slot=1").status_code == 200
        body = {"prompt": "secret", "n_predict": 9, "ignore_eos": True, "stream": True}
        gate.let(4)  # a stream begins with its first token
        with running.web.stream("POST", f"{running.url}/completion", json=body) as response:
            lines = response.iter_lines()
            assert next(lines)
            assert gate.waiting.wait(WAIT_S)
            busy, other = running.get("/slots").json()
            assert (busy["is_processing"], other["is_processing"]) == (True, False)
            assert (busy["n_prompt_tokens_processed"], busy["n_prompt_tokens_cache"]) == (6, 0)
            assert busy["params"]["n_predict"] == 9
            (token,) = busy["next_token"]
            assert token["has_next_token"] is True
            assert token["n_decoded"] + token["n_remain"] == 9
            assert "secret" not in json.dumps(busy)
            gate.open()
            assert [line for line in lines if line]
        again = running.get("/slots").json()[0]
        assert again["is_processing"] is False
        assert again["next_token"][0]["has_next_token"] is False


def test_what_others_ask_is_not_told() -> None:
    """Their seeds and settings are theirs, while an answer runs and after; so is the end of its reasoning."""
    gate = Turnstile(writing_model())
    options = ServerOptions(api_key=("mine", "yours"))
    mine, yours = ({"Authorization": f"Bearer {key}"} for key in options.api_key)
    with hosted(lambda: scripted(target=gate, drafts=False, max_sequences=1), options) as running:
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9, "seed": 77, "stream": True}
        url = f"{running.url}/v1/chat/completions"

        def slot(headers: dict[str, str]) -> dict[str, Any]:
            (found,) = running.get("/slots", headers=headers).json()
            return dict(found)

        gate.let(4)  # a stream begins with its first token
        with running.web.stream("POST", url, json={**body, "ignore_eos": True}, headers=mine) as response:
            lines = response.iter_lines()
            answer_id = json.loads(next(lines).removeprefix("data: "))["id"]
            assert gate.waiting.wait(WAIT_S)
            own, other = slot(mine), slot(yours)
            assert (own.pop("params")["seed"], own["is_processing"]) == (77, True)
            assert other == own
            assert "77" not in json.dumps(other)
            for asked_id in (answer_id, "x"):
                control = {"id": asked_id, "action": "reasoning_end"}
                told = running.post("/v1/chat/completions/control", control, headers=yours).json()
                assert told["message"] == "no active completion for this id"
            gate.open()
            assert [line for line in lines if line]
        assert "params" in slot(mine)
        assert "params" not in slot(yours)


def test_all_places_taken_is_status_503_where_that_is_asked() -> None:
    gate = Turnstile(writing_model())
    with hosted(lambda: scripted(target=gate, drafts=False, max_sequences=1)) as running:
        body = {"prompt": "a", "stream": True, "ignore_eos": True}
        gate.let(4)  # a stream begins with its first token
        with running.web.stream("POST", f"{running.url}/completion", json=body) as response:
            lines = response.iter_lines()  # dropping it would close the stream
            assert next(lines)
            response_when_full = running.get("/slots?fail_on_no_slot=1")
            assert response_when_full.status_code == 503
            assert response_when_full.json()["error"]["type"] == "unavailable_error"
            assert running.get("/slots").status_code == 200
        gate.open()


def test_routes_of_others_are_not_found_in_words(server: Hosted) -> None:
    # OpenAI's clients would try status 501 again, twice.
    error = server.refusal("/lora-adapters", {}, 404)
    assert (error["type"], "this server does not support" in error["message"]) == ("not_found_error", True)
    assert server.get("/lora-adapters").status_code == 404


def test_what_is_not_offered_without_a_flag_is_status_501() -> None:
    with hosted(scripted, ServerOptions(slots=False, ui=False)) as running:
        for path, flag in (("/slots", "--slots"), ("/metrics", "--metrics")):
            response = running.get(path)
            assert response.status_code == 501
            assert response.json()["error"]["type"] == "not_supported_error"
            assert flag in response.json()["error"]["message"]
        assert {running.get(f"/{name}").status_code for name in page_files()} == {404}
        props = running.get("/props").json()
        assert (props["endpoint_slots"], props["endpoint_metrics"], props["ui"]) == (False, False, False)


def test_figures_come_under_the_names_of_three_servers() -> None:
    with hosted(scripted, ServerOptions(metrics=True)) as running:
        answer = running.answer("/completion", {"prompt": "abc", "n_predict": 40, "ignore_eos": True, "seed": 1})
        running.refusal("/completion", {"prompt": "abc", "temperature": -1})
        timings = answer["timings"]
        response = running.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain")
        assert float(response.headers["process-start-time-unix"]) > 0
        lines = [line for line in response.text.splitlines() if not line.startswith("#")]
        values = {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}

        def value(beginning: str) -> float:
            return sum(number for name, number in values.items() if name.partition("{")[0] == beginning)

        assert value("llamacpp:prompt_tokens_total") == value("vllm:prompt_tokens_total") == 3
        assert value("llamacpp:tokens_predicted_total") == value("vllm:generation_tokens_total") == 40
        assert value("llamacpp:spec_decode_num_draft_tokens_total") == timings["draft_n"]
        assert value("vllm:spec_decode_num_accepted_tokens_total") == timings["draft_n_accepted"]
        assert value("vllm:request_success_total") == 1
        assert value("llamacpp:requests_processing") == value("vllm:num_requests_running") == 0
        assert any(name.startswith("paceline:") for name in values)


# Paths


@pytest.mark.parametrize("prefix", ["", "/llm/v2"])
def test_every_route_is_in_the_document_and_the_document_has_no_loose_ends(prefix: str) -> None:
    with hosted(scripted, ServerOptions(prefix=prefix)) as running:
        document = running.get("/openapi.json").json()
        told = {(method.upper(), path) for path, operations in document["paths"].items() for method in operations}
        routes = [route for route in Handlers(running.server).routes() if route.summary]
        # By its first method and path alone.
        assert told == {(route.methods[0], prefix + route.paths[0].replace(":path", "")) for route in routes}
        references = re.findall(r'"\$ref": "([^"]*)"', json.dumps(document))
        assert len(references) > 20
        for reference in references:
            found = document
            for part in reference.removeprefix("#/").split("/"):
                found = found[part]
            assert found["type"] == "object"
        for operations in document["paths"].values():
            for operation in operations.values():
                assert operation["summary"]
                assert "default" in operation["responses"]
                assert "422" not in operation["responses"]


def test_all_paths_of_a_route_answer_alike(server: Hosted) -> None:
    for route in Handlers(server.server).routes():
        if route.methods == ("POST",) and "{" not in route.paths[0] and route.summary:
            answers = [server.post(path, {}) for path in route.paths]
            assert {answer.status_code for answer in answers} <= {200, 400, 404}
            assert all(answer.json() == answers[0].json() for answer in answers), route.paths


def ask_each(security: SecuritySettings, *methods: str, prefix: str = "") -> dict[str, set[int]]:
    """Return the statuses that each path of the table gets while no model is there: 503, 404, 405 or 501."""

    def load(report: Any) -> Any:
        raise AssertionError

    server = Server(ModelHost(load), ServerOptions(prefix=prefix))
    app = create_app(server, security)

    async def statuses() -> dict[str, set[int]]:
        found: dict[str, set[int]] = {}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=HOME + prefix) as client:
            for path in {path for _, path in table(server)}:
                for method in methods:
                    found.setdefault(path, set()).add((await client.request(method, path)).status_code)
        return found

    return run(statuses)


@pytest.mark.parametrize("prefix", ["", "/ai"])
def test_without_a_key_nothing_of_the_table_but_health_may_be_read(prefix: str) -> None:
    locked = SecuritySettings(keys=ApiKeys(["k"]))
    statuses = ask_each(locked, "GET", "HEAD", prefix=prefix)
    assert {path for path, found in statuses.items() if 401 not in found} == PUBLIC
    assert all(401 in found for found in ask_each(locked, "POST").values())


def test_what_is_polled_is_logged_quietly(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, LOGGER.name)
    ask_each(SecuritySettings(), "GET")
    lines = [(each.levelno, each.getMessage().split()[1]) for each in caplog.records if each.name == LOGGER.name]
    assert {path for level, path in lines if level == logging.DEBUG} == POLLED
    caplog.clear()
    ask_each(SecuritySettings(keys=ApiKeys(["k"])), "GET")
    lines = [(each.levelno, each.getMessage().split()[1]) for each in caplog.records if each.name == LOGGER.name]
    assert {path for level, path in lines if level == logging.DEBUG} == PUBLIC


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/no/such"), ("POST", "/v1/audio/speech"), ("HEAD", "/no"), ("GET", "/v1/files")]
)
def test_what_nobody_offers_is_not_found(server: Hosted, method: str, path: str) -> None:
    response = server.web.request(method, server.url + path)
    assert response.status_code == 404
    if method != "HEAD":
        error = response.json()["error"]
        assert (error["type"], "File Not Found" in error["message"]) == ("not_found_error", True)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/completion", "POST"),
        ("HEAD", "/v1/chat/completions", "POST"),
        ("DELETE", "/v1/chat/completions", "POST"),
        ("PUT", "/props", "GET, HEAD, POST"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("POST", "/v1/models/scripted", "GET, HEAD"),
        ("POST", "/", "GET, HEAD"),
    ],
)
def test_another_method_is_told_by_which_to_ask(server: Hosted, method: str, path: str, allowed: str) -> None:
    response = server.web.request(method, server.url + path)
    assert (response.status_code, response.headers["allow"]) == (405, allowed)
    if method != "HEAD":
        error = response.json()["error"]
        assert (error["code"], error["type"]) == (405, "invalid_request_error")
        assert allowed.replace(", ", " or ") in error["message"]


def test_every_route_that_answers_get_answers_head(server: Hosted) -> None:
    paths = [path for method, path in table(server.server) if method == "GET" and "{" not in path]
    for path in (*paths, "/v1/models/scripted", "/", "/page/app.js"):
        asked, response = server.get(path), server.web.head(server.url + path)
        assert (response.status_code, response.content) == (asked.status_code, b""), path
        assert response.headers["content-type"] == asked.headers["content-type"]
        if path not in ("/metrics", "/slots"):
            assert response.headers["content-length"] == asked.headers["content-length"], path


def test_a_prefix_is_a_path() -> None:
    assert ServerOptions(prefix="/llm/").prefix == "/llm"
    for prefix in ("llm", "/{llm}", "/l?m", "/l m"):
        with pytest.raises(InputError, match="prefix"):
            ServerOptions(prefix=prefix)
