"""A model that nobody asks is freed, and loaded again by the next request."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from paceline.core.errors import ClosedError, InputError
from paceline.server_options import ServerOptions
from paceline.serving.model_host import ServedModel
from tests.serving.hosted import Hosted, hosted, scripted
from tests.serving.processes import poll
from tests.timing import WAIT_S

SLEEPY = ServerOptions(sleep_idle_s=0.05, metrics=True)


class Loader:
    """Loads scripted models, as often as it is asked, and may be told to fail or to wait."""

    def __init__(self) -> None:
        self.made: list[ServedModel] = []
        self.error: Exception | None = None
        self.go_on = threading.Event()
        self.go_on.set()

    def __call__(self) -> ServedModel:
        assert self.go_on.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        self.made.append(scripted())
        return self.made[-1]


def wait_for_sleep(running: Hosted) -> None:
    poll(lambda: running.get("/props").json()["is_sleeping"])


def test_a_model_sleeps_while_nobody_asks_and_is_told_of_all_the_same() -> None:
    loader = Loader()
    with hosted(loader, SLEEPY) as running:
        said = running.answer("/completion", {"prompt": "a", "n_predict": 4, "seed": 1})["content"]
        awake = {path: running.get(path).json() for path in ("/v1/models", "/v1/models/scripted", "/props")}
        counted = running.get("/metrics").text
        wait_for_sleep(running)
        assert {path: running.get(path).json() for path in awake} == {
            **awake,
            "/props": {**awake["/props"], "is_sleeping": True},
        }
        assert running.get("/health").json() == {"status": "ok"}
        slots = running.get("/slots").json()
        assert [slot["is_processing"] for slot in slots] == [False] * awake["/props"]["total_slots"]
        assert "llamacpp:tokens_predicted_total 4.0" in counted
        assert "llamacpp:tokens_predicted_total 4.0" in running.get("/metrics").text
        # None of these woke it.
        assert running.get("/props").json()["is_sleeping"]
        assert len(loader.made) == 1
        with pytest.raises(ClosedError):
            loader.made[0].model.generate("a")
        # What was counted before goes on.
        assert running.answer("/completion", {"prompt": "a", "n_predict": 4, "seed": 1})["content"] == said
        assert "llamacpp:tokens_predicted_total 8.0" in running.get("/metrics").text
        wait_for_sleep(running)
        assert running.answer("/tokenize", {"content": "ab"})["tokens"]
        assert len(loader.made) == 3


def test_all_who_ask_a_sleeping_model_wait_for_one_load() -> None:
    loader = Loader()
    with hosted(loader, SLEEPY) as running, ThreadPoolExecutor(8) as clients:
        wait_for_sleep(running)
        loader.go_on.clear()
        body = {"prompt": "a", "n_predict": 4, "seed": 1}
        asking = [clients.submit(running.answer, "/completion", body) for _ in range(8)]
        # Meanwhile it is told of as before.
        assert running.get("/health").status_code == 200
        loader.go_on.set()
        assert len({each.result(WAIT_S)["content"] for each in asking}) == 1
        assert len(loader.made) == 2


@pytest.mark.long
def test_a_long_answer_keeps_the_model_awake() -> None:
    loader = Loader()
    with hosted(loader, ServerOptions(sleep_idle_s=0.001)) as running:
        body = {"prompt": "a", "n_predict": 400, "ignore_eos": True, "seed": 1}
        assert running.answer("/completion", body)["tokens_predicted"] == 400
        assert len(running.chunks("/completion", body)) > 1


def test_a_model_that_cannot_be_loaded_again_is_tried_by_each_request() -> None:
    loader = Loader()
    with hosted(loader, SLEEPY) as running:
        wait_for_sleep(running)
        loader.error = InputError("no memory")
        assert "could not be loaded" in running.refusal("/completion", {"prompt": "a"}, 503)["message"]
        assert running.get("/health").status_code == 200
        loader.error = None
        assert running.answer("/completion", {"prompt": "a", "n_predict": 1})["tokens_predicted"] == 1


def test_a_server_ends_while_its_model_sleeps() -> None:
    with hosted(Loader(), SLEEPY) as running:
        wait_for_sleep(running)


def test_no_time_at_all_is_refused() -> None:
    with pytest.raises(InputError, match="sleep_idle_s"):
        ServerOptions(sleep_idle_s=0)
    with pytest.raises(InputError) as caught:
        ServerOptions(models_memory="lots")
    assert caught.value.field == "models_memory"
