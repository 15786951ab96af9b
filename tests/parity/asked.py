"""Requests of our own, asked as pairs beside those of llama.cpp's tests: each route, with the fields clients send.

Left out is what paceline answers differently on purpose: samplers out of their range, bodies that are not JSON,
``suffix`` and ``best_of``, other methods of a route, and errors of the Messages API, which have Anthropic's form.
"""

from __future__ import annotations

from typing import Any

from tests.parity import asked_tools
from tests.parity.launcher import TEXT_MODELS
from tests.parity.pairs import Start, get, post

PROMPT = "I believe the meaning of life is"
MESSAGES = [{"role": "system", "content": "Book"}, {"role": "user", "content": "What is the best book"}]
KEY = "sk-pairs"
TEMPLATES = ("chatml", "llama3", "command-r", "gemma", "phi3")

# Greedy and without an end: the same number of tokens, hence the same kinds of events, whatever the server.
FIXED: dict[str, Any] = {"temperature": 0, "ignore_eos": True}

FLAGS = ["--port", "0", "--hf-repo", TEXT_MODELS[0], "--alias", "pairs", "--seed", "42", "--temp", "0.8"]
SIZES = ["--ctx-size", "512", "--parallel", "2", "--batch-size", "32", "--n-predict", "64"]


def starts() -> list[Start]:
    """Return the servers to start and what to ask of each."""
    return [
        Start("asked: state", [*FLAGS, *SIZES, "--slots", "--no-jinja", "--metrics"], _state()),
        Start("asked: completion", [*FLAGS, *SIZES, "--slots", "--no-jinja"], _completion()),
        Start("asked: chat", [*FLAGS, *SIZES, "--no-slots", "--jinja"], _chat()),
        Start("asked: conversations", [*FLAGS, *SIZES, "--no-slots", "--jinja"], _conversations()),
        Start("asked: verbose", [*FLAGS, *SIZES, "--no-slots", "--jinja", "--verbose"], _verbose()),
        Start("asked: switched off", [*FLAGS, *SIZES, "--no-slots", "--no-jinja", "--no-ui"], _switched_off()),
        Start("asked: slots", [*FLAGS, *SIZES, "--slots", "--no-jinja", "--slot-save-path", "."], _slots()),
        Start("asked: key", [*FLAGS, *SIZES, "--no-slots", "--no-jinja", "--api-key", KEY], _key()),
        Start("asked: names", [*FLAGS, *SIZES, "--no-slots", "--no-jinja", "--tags", "b,a"], [get("/v1/models")]),
        *(
            Start("asked: template", [*FLAGS, "--no-slots", "--no-jinja", "--chat-template", name], _template())
            for name in TEMPLATES
        ),
        *asked_tools.starts(),
    ]


def _state() -> list[dict[str, Any]]:
    return [
        *map(get, ("/health", "/v1/health", "/props", "/slots", "/models", "/v1/models", "/metrics", "/nowhere")),
        post("/completion", prompt=PROMPT, n_predict=4, **FIXED),
        *map(get, ("/slots", "/metrics", "/slots?fail_on_no_slot=1")),
        post("/tokenize", content="What is the capital of France ?"),
        post("/tokenize", content="What is", add_special=True),
        post("/tokenize", content="unicode 媽 and 🤗", with_pieces=True),
        post("/tokenize", content="<|im_start|>user", parse_special=False),
        post("/tokenize", content=["a", 5, "b"]),
        post("/tokenize"),
        post("/detokenize", tokens=[1780, 314, 260]),
        post("/detokenize"),
        post("/nowhere", prompt=PROMPT),
    ]


def _completion() -> list[dict[str, Any]]:
    native: list[dict[str, Any]] = [
        {},
        {"n_probs": 3},
        {"n_probs": 3, "temperature": 1.0, "post_sampling_probs": True},
        {"n_probs": 3, "post_sampling_probs": True},
        {"return_tokens": True},
        {"timings_per_token": True},
        {"return_progress": True, "cache_prompt": False},
        {"n": 2},
        {"response_fields": ["content", "generation_settings/n_predict", "prompt", "nothing"]},
        {"response_fields": []},
        {"logit_bias": [[" the", -100], [260, False]]},
        {"logit_bias": {"260": -100, " happy": 1.5}},
        {"stop": ["\n", "."]},
        {"stop": None, "top_k": None, "temperature": None, "seed": None},
        {"seed": 7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "repeat_penalty": 1.1, "presence_penalty": 0.1},
        {"samplers": ["top_k", "temperature"]},
        {"id_slot": 1, "cache_prompt": True},
    ]
    prompts: list[Any] = [[PROMPT, "Hello"], [PROMPT], [1, 2, 3, PROMPT, 7], {"prompt_string": PROMPT}, [504, 1450], ""]
    wrong: list[Any] = [None, 3, [], [1, 99_999_999], {"prompt_string": PROMPT, "multimodal_data": "x"}, PROMPT * 60]
    openai: list[dict[str, Any]] = [{}, {"logprobs": 3}, {"n": 2}, {"stream_options": {"include_usage": True}}]
    return [
        *(post("/completion", **{"prompt": PROMPT, "n_predict": 4, **FIXED, **more}) for more in native),
        *(
            post("/completion", **{"prompt": PROMPT, "n_predict": 4, **FIXED, **more, "stream": True})
            for more in native
            if "n" not in more
        ),
        *(post("/completion", prompt=prompt, n_predict=2, **FIXED) for prompt in [*prompts, *wrong]),
        post("/completion", prompt=PROMPT * 60, stream=True),
        post("/completion", prompt=PROMPT, n_predict=-1, ignore_eos=True),
        post("/completion", prompt=PROMPT, n_predict=300, **FIXED),
        post("/completion", prompt=PROMPT, n_predict="many"),
        post("/completion", prompt=PROMPT, temperature="hot"),
        post("/completion", n_predict=2),
        post("/completions", prompt=PROMPT, max_tokens=2, **FIXED),
        *(
            post("/v1/completions", prompt=PROMPT, max_tokens=3, stream=stream, **FIXED, **more)
            for more in openai
            for stream in (False, True)
            if not (stream and "n" in more)
        ),
        post("/v1/completions", prompt=[PROMPT, "Hello"], max_tokens=3, **FIXED),
        post("/v1/completions", max_tokens=3),
    ]


def _chat() -> list[dict[str, Any]]:
    fields: list[dict[str, Any]] = [
        {},
        {"logprobs": True, "top_logprobs": 4},
        {"logprobs": True},
        {"n": 2},
        {"stream_options": {"include_usage": True}},
        {"stream_options": {"include_usage": False}},
        {"stream_options": {"include_usage": True}, "timings_per_token": True},
        {"return_progress": True, "cache_prompt": False},
        {"verbose": True},
        {"model": "another", "user": "a", "metadata": {"a": "b"}},
    ]
    said = {"role": "assistant", "content": "The best"}
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "the best book"}]
    conversations: list[Any] = [
        [*MESSAGES, said],
        [{"role": "user", "content": parts}],
        [{"role": "user", "content": "Hi"}, said, {"role": "user", "content": "And?"}],
    ]
    wrong: list[Any] = [None, "text", [123], [{}], [{"role": "user"}], [{"role": "user", "content": 1}], [said, said]]
    return [
        *(
            post("/v1/chat/completions", messages=MESSAGES, max_tokens=3, stream=stream, **FIXED, **more)
            for more in fields
            for stream in (False, True)
            if not (stream and "n" in more)
        ),
        *(post("/v1/chat/completions", messages=talk, max_tokens=2, verbose=True, **FIXED) for talk in conversations),
        *(post("/chat/completions", messages=talk, max_tokens=2) for talk in wrong),
        post("/v1/chat/completions", max_tokens=2),
        post("/v1/chat/completions", messages=MESSAGES * 100),
        post("/v1/chat/completions", messages=MESSAGES * 100, stream=True),
        post("/v1/chat/completions", messages=MESSAGES, top_logprobs=3),
        post("/v1/chat/completions", messages=MESSAGES, response_format={"type": "sound"}),
        post(
            "/v1/chat/completions", messages=[*MESSAGES, said], add_generation_prompt=True, continue_final_message=True
        ),
        post("/v1/chat/completions/input_tokens", messages=MESSAGES),
        post("/v1/chat/completions/control", id="chatcmpl-none", action="reasoning_end"),
        post("/v1/chat/completions/control"),
        *(post("/apply-template", messages=talk) for talk in [MESSAGES, *conversations]),
        post("/apply-template", messages=MESSAGES, add_generation_prompt=False),
        post("/apply-template", messages="text"),
    ]


def _conversations() -> list[dict[str, Any]]:
    """Return what is asked of the APIs of conversations that have other forms than chats."""
    said = {"role": "assistant", "content": "The best"}
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "the best book"}]
    talk: list[Any] = [{"role": "user", "content": parts}, said, {"role": "user", "content": "And?"}]
    items: list[Any] = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "What is the best book"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "The best"}]},
        {"role": "user", "content": "And?"},
    ]
    asked: dict[str, list[dict[str, Any]]] = {
        "/v1/responses": [
            *({"input": given, "max_output_tokens": 20} for given in ("Hello", MESSAGES, items)),
            {"input": "Hello", "instructions": "Book", "max_output_tokens": 20},
        ],
        "/v1/messages": [
            *({"messages": given, "max_tokens": 20} for given in (MESSAGES[1:], talk)),
            {"messages": MESSAGES[1:], "system": "Book", "max_tokens": 20},
            {"messages": MESSAGES[1:], "system": [{"type": "text", "text": "Book"}], "max_tokens": 20},
        ],
    }
    # An answer that is cut off is completed there, and incomplete here, as in OpenAI's API.
    fixed: dict[str, Any] = {"temperature": 0, "grammar": 'root ::= "a book"'}
    return [
        *(post(path, stream=on, **body, **fixed) for path in asked for body in asked[path] for on in (False, True)),
        *(post("/v1/responses/input_tokens", input=given) for given in ("Hello", MESSAGES, items)),
        *(post("/v1/messages/count_tokens", messages=given) for given in (MESSAGES[1:], talk)),
        post("/v1/responses", input=[{}], max_output_tokens=3),
        post("/v1/responses", input=[1], max_output_tokens=3),
        post("/v1/responses", max_output_tokens=3),
        post("/v1/responses", input=MESSAGES * 100, max_output_tokens=3),
    ]


def _verbose() -> list[dict[str, Any]]:
    return [
        *(post("/v1/chat/completions", messages=MESSAGES, max_tokens=2, stream=on, **FIXED) for on in (False, True)),
        *(post("/v1/completions", prompt=PROMPT, max_tokens=2, stream=on, **FIXED) for on in (False, True)),
        post("/completion", prompt=PROMPT, n_predict=2, **FIXED),
    ]


def _switched_off() -> list[dict[str, Any]]:
    return [
        *map(get, ("/", "/slots", "/metrics")),
        post("/props"),
        post("/slots/0?action=save", filename="a"),
        post("/v1/embeddings", input="a"),
        post("/v1/rerank", query="a", documents=["b"]),
    ]


def _slots() -> list[dict[str, Any]]:
    prompt = " ".join([PROMPT] * 3)
    actions = [
        *(("1", "save", "one.bin"), ("0", "restore", "one.bin"), ("1", "erase", None), ("1", "save", "one.bin")),
        *(("0", "restore", "none.bin"), ("0", "save", "../one.bin"), ("0", "move", "one.bin")),
    ]
    asked = [post(f"/slots/{slot}?action={action}", filename=name) for slot, action, name in actions]
    answered = [post("/completion", prompt=prompt, n_predict=8, id_slot=slot, **FIXED) for slot in (1, 0, 1)]
    return [answered[0], *asked[:2], answered[1], *asked[2:3], answered[2], *asked[3:]]


def _key() -> list[dict[str, Any]]:
    request: dict[str, Any] = {"prompt": PROMPT, "n_predict": 2, **FIXED}
    return [
        *map(get, ("/health", "/props", "/v1/models")),
        post("/completion", **request),
        post("/completion", headers={"authorization": "Bearer wrong"}, **request),
        post("/completion", headers={"authorization": f"Bearer {KEY}"}, **request),
        post("/completion", headers={"x-api-key": KEY}, **request),
    ]


def _template() -> list[dict[str, Any]]:
    return [post("/apply-template", messages=MESSAGES)]
