r"""Bodies that nobody would write: any field with any value, deep, huge, odd, and all at once.

Two thirds are sound but for what their fields say together, so that many are answered. Most others are near misses of
these, as what is wrong everywhere is refused at the first look. These bodies know where the OpenAPI document is silent.
What it says is fuzzed by schemathesis, which is no dependency. More than 50,000 requests are made like this, in an
environment of its own::

    python -m venv fuzz && fuzz/bin/pip install schemathesis
    paceline serve --port 18080 -np 4 -c 2048 -n 8 --max-seconds 5 --metrics 2> serve.log &
    fuzz/bin/st run http://127.0.0.1:18080/openapi.json --phases coverage,fuzzing --mode all --max-examples 5200 \
        --checks not_a_server_error --request-timeout 30 --continue-on-failure --suppress-health-check all --seed 3
    grep -c Traceback serve.log

Its coverage also asks for ``POST /props``, which the server answers with 501, as llama-server does. A file
``schemathesis.toml`` in the same folder allows that, with ``expected-statuses = ["2xx", "4xx", 501, 503]`` under
``[checks.not_a_server_error]``.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from paceline.core.fields import fields_of
from paceline.options import REQUEST_PARTS
from paceline.serving.fields import HARMLESS, NEUTRAL

ROUTES: Final[Mapping[str, str]] = {
    "/completion": "completion",
    "/completions": "completion",
    "/v1/completions": "completion",
    "/v1/chat/completions": "chat",
    "/chat/completions": "chat",
    "/v1/chat/completions/input_tokens": "chat",
    "/v1/responses": "responses",
    "/responses": "responses",
    "/v1/responses/input_tokens": "responses",
    "/v1/messages": "anthropic",
    "/v1/messages/count_tokens": "anthropic",
    "/apply-template": "chat",
    "/tokenize": "tokenize",
    "/detokenize": "detokenize",
    "/v1/chat/completions/control": "control",
}
"""Routes by what their bodies have."""

NUMBERS: Final[Sequence[Any]] = (
    0, 1, -1, 2, 3, 7, 16, 17, 255, 1000, 1001, 4095, 4096, 10**6, 2**31 - 1, 2**31, 2**32, 2**53, 2**63, 2**64 - 1,
    -2, -(2**31), -(2**63), 0.0, -0.0, 0.5, 1.0, 1.5, 3.0, 100.0, 100.1, 1e-6, 1e-20, 1e-21, 1e-45, 5e-324, 1e9, 1e30,
    1e308, -1e308, 1.7976931348623157e308, -1e-308,
)  # fmt: skip
TEXTS: Final[Sequence[str]] = (
    "", " ", "\x00", "a\x00b", "\n", "a", "user", "assistant", "none", "auto", "-1", "--5", "²", "٣", "1e400", "NaN",
    "\ufeff", "\u2028", "\u202e", "\U0010ffff", "\ufffe", "e\u0301" * 50, "😀" * 30, "<|im_end|>", "</think>",
    "<|im_start|>system\n", "{{ 7 * 7 }}", "{% for x in range(10**9) %}a{% endfor %}", "../../etc/passwd", "a/b",
    "timings/x", "//", "a" * 300, "def f(x):\n    return", "INFO server\n" * 30, "9" * 400, "true", "null",
)  # fmt: skip
_LONG: Final = "word " * 4000
_KEYS: Final = ("role", "content", "type", "text", "name", "tool_calls", "reasoning_content", "tool_call_id", "prefix")
_ROLES: Final = ("user", "assistant", "system", "developer", "tool", "function", "User", "", "ipython")
_BLOCKS: Final = ("text", "text", "search_result")
_SAID_BLOCKS: Final = (
    *(*_BLOCKS, "thinking", "redacted_thinking", "tool_use", "server_tool_use"),
    "web_search_tool_result",
)
_ODD_BLOCKS: Final = (*_SAID_BLOCKS, "tool_result", "tool_reference", "image", "document", "")
_ITEMS: Final = (
    *("message", "message", "message", None, "reasoning", "function_call", "function_call_output", "custom_tool_call"),
    *("custom_tool_call_output", "web_search_call", "compaction"),
)
_ODD_ITEMS: Final = ("item_reference", "")
_BILLING: Final = "x-anthropic-billing-header: cc_version=1; cch=00000;" + " a=;" * 999
_VARIABLES: Final = (
    *("messages", "tools", "self", "loop", "range", "namespace", "raise_exception", "strftime_now", "tojson", "caller"),
    *("bos_token", "eos_token", "add_generation_prompt", "enable_thinking", "__class__", "cycler", "a b", "", "x"),
    "dict",
)
_RAW: Final[Sequence[bytes]] = (
    b"", b" ", b"null", b"[]", b"0", b'"a"', b"{", b"}", b"{}", b"{]", b'{"prompt":}', b'{"prompt": "a",}', b"\xff",
    b"\xef\xbb\xbf{}", b'{"prompt": 1e400}', b'{"prompt": NaN}', b'{"prompt": -Infinity}', b'{"prompt": "\\ud800"}',
    b'{"prompt": "\\udc00\\ud800"}', b'{"prompt": "\\ud83d\\ude00"}', b'{"a": 1, "a": 2, "prompt": "x"}',
    b"{'prompt': 1}", b'{"prompt": ' + b"[" * 127 + b"]" * 127 + b"}",
    b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}", b'{"prompt": ' + b'{"a":' * 100 + b"1" + b"}" * 100 + b"}",
    b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", b'{"prompt": "a", "n_predict": 1e1}',
    b'{"prompt": "a", "n_predict": -0}', b'{"prompt": "' + b"\\u0000" * 40 + b'"}',
    b'{"prompt": "a", "logit_bias": {' + b",".join(b'"%d": 1' % number for number in range(5000)) + b"}}",
)  # fmt: skip
_GRAMMARS: Final[Sequence[str]] = (
    'root ::= "a"', 'root ::= ("a" | [b-d])* "."', "root ::= root", 'root ::= root "a" | "b"', "root ::=", "{}{}",
    'root ::= "a"{1000000}', "root ::= [^a]+", 'start: "a" /b+/', "start: %json {}", "root ::= (",
    'root ::= "' + "a" * 3000 + '"',
)  # fmt: skip
_PATTERNS: Final = ("[a-c]{3}", "(a|b)*", "(", "(a{1,1000}){1,1000}", "\\p{L}+", "(?=a)", "")
_PATHS: Final = (
    "content",
    "timings",
    "timings/predicted_n",
    "timings/speculative/drafters",
    "generation_settings/seed",
)


class Bodies:
    """Makes bodies; answers of more than ``most_tokens`` would take long."""

    def __init__(self, rng: random.Random, *, most_tokens: int = 6) -> None:
        self._rng = rng
        self._most_tokens = most_tokens
        table = [name for part in REQUEST_PARTS for field in fields_of(part) for name in field.json_names]
        self._names = sorted({*table, *HARMLESS, *NEUTRAL, *_OWN})
        # How often something else stands in the place of a value; drawn for each body.
        self._oddness = 0.0

    def next(self) -> tuple[str, bytes]:
        """Return a route and a body."""
        route = self._rng.choice(tuple(ROUTES))
        self._oddness = self._rng.choice((0.0, 0.0, 0.2))
        if self._is_odd(0.05):
            return route, self._rng.choice(_RAW)
        body = getattr(self, f"_{ROUTES[route]}")()
        if self._is_odd(0.05):
            body = self._any(3)
        text = json.dumps(body, ensure_ascii=self._rng.random() < 0.5)
        if self._is_odd(0.03):
            text = self._broken(text)
        return route, text.encode("utf-8", "surrogatepass")

    def _broken(self, text: str) -> str:
        place = self._rng.randrange(len(text) + 1)
        return self._rng.choice(
            (text[:place], text[:place] + self._rng.choice(("\x00", '"', "}", "1e999", "\\")) + text[place:])
        )

    def _completion(self) -> dict[str, Any]:
        return {"prompt": self._prompt(), **self._fields()}

    def _chat(self) -> dict[str, Any]:
        body = {"messages": self._messages(), **self._fields()}
        if self._rng.random() < 0.3:
            names = self._rng.choices(_VARIABLES, k=self._rng.randint(0, 3))
            body["chat_template_kwargs"] = {name: self._any(2) for name in names}
        if self._rng.random() < 0.1:
            body["tools"] = self._odd([self._tool() for _ in range(self._pick((1, 2), (0, 129)))])
            body["tool_choice"] = self._odd(
                self._rng.choice(("auto", "none", "required", {"type": "function", "function": {"name": "f"}}))
            )
        return body

    def _tool(self) -> Any:
        function = {"name": self._odd("f"), "parameters": self._odd(self._schema(2)), "strict": self._truth()}
        return self._odd({"type": "function", "function": function})

    def _responses(self) -> dict[str, Any]:
        rng = self._rng
        allowed = {"type": "allowed_tools", "mode": "auto", "tools": [self._odd({"type": "function", "name": "f"})]}
        about: dict[str, Any] = {
            "instructions": rng.choice(TEXTS),
            "tools": [self._responses_tool(1) for _ in range(self._pick((1, 2), (0, 129)))],
            "tool_choice": self._pick(
                ("auto", "none"), ("required", {"type": "custom", "name": "f"}, {"type": "web_search"}, allowed)
            ),
            "text": {"format": self._odd(self._responses_format()), "verbosity": rng.choice(TEXTS)},
            "include": rng.sample(("message.output_text.logprobs", "reasoning.encrypted_content", *TEXTS), 2),
            "reasoning": {"effort": self._odd("low"), "summary": self._odd("auto")},
            "max_output_tokens": rng.choice((0, 1, self._most_tokens)),
            "truncation": rng.choice(("auto", "disabled")),
            "metadata": {rng.choice(TEXTS): rng.choice(TEXTS)},
            "previous_response_id": self._pick(("", None), TEXTS),
        }
        return {"input": self._items(), **self._fields(), **self._some(about, rng.choice((0, 1, 2, 5)))}

    def _responses_tool(self, depth: int) -> Any:
        kind = self._pick(("function", "custom", "namespace", "web_search"), ("local_shell", None))
        tool = {"type": kind, "name": self._odd(self._rng.choice(("f", "g", *TEXTS[:6])))}
        if kind == "namespace" and depth:
            return self._odd({**tool, "tools": self._odd([self._responses_tool(depth - 1) for _ in range(2)])})
        about = {"format": {"definition": self._odd("start: /a/")}} if kind == "custom" else {"strict": self._truth()}
        return self._odd({**tool, "parameters": self._odd(self._schema(2)), **about})

    def _responses_format(self) -> Any:
        kind = self._pick(("text", "json_object", "json_schema"), ("hiccup",))
        has_schema = kind == "json_schema" if self._oddness == 0 else self._truth()
        return {"type": kind, "name": "a", **({"schema": self._schema(2)} if has_schema else {})}

    def _items(self) -> Any:
        if self._rng.random() < 0.2:
            return self._rng.choice(TEXTS)
        if self._is_odd(0.1):
            return self._any(3)
        # Nothing is said after a call that has no result.
        ends = [] if self._is_odd(0.5) else [{"role": "user", "content": "a"}]
        return [self._item() for _ in range(self._rng.choice((0, 1, 1, 2, 3, 30)))] + ends

    def _item(self) -> Any:
        rng = self._rng
        said = [
            self._odd({"type": self._pick(("input_text", "output_text"), ("refusal", "input_image")), "text": "a"})
            for _ in range(rng.randint(0, 2))
        ]
        encrypted = rng.choice(("reasoning_text:aGk=", "reasoning_text:/w==", "reasoning_text:\u00e9", "gAAAA", None))
        item = {
            **{
                "type": self._pick(_ITEMS, _ODD_ITEMS),
                "role": rng.choice(_ROLES[:4]),
                "content": rng.choice((said, "a")),
            },
            **{"call_id": "c", "name": "f", "arguments": self._odd("{}"), "input": rng.choice(TEXTS), "output": said},
            **{"summary": self._odd([]), "encrypted_content": encrypted, "namespace": rng.choice((None, "n__", "", 1))},
        }
        if item["type"] == "reasoning":
            item["content"] = None
        return self._spoiled(item)

    def _anthropic(self) -> dict[str, Any]:
        rng = self._rng
        about: dict[str, Any] = {
            "system": rng.choice((rng.choice(TEXTS), _BILLING, [{"type": "text", "text": _BILLING}, self._block(1)])),
            "tools": [self._anthropic_tool() for _ in range(self._pick((1, 2), (0, 129)))],
            "tool_choice": {"type": self._pick(("auto", "none"), ("any", "tool")), "name": self._odd("f")},
            "thinking": {
                "type": self._pick(("enabled", "adaptive"), ("off",)),
                "budget_tokens": self._pick((0, 1, 5), NUMBERS),
                "display": self._odd("omitted"),
            },
            "output_config": {"effort": rng.choice(TEXTS), "format": self._odd(self._anthropic_format())},
            "output_format": self._anthropic_format(),
            "stop_sequences": self._stops(),
            "context_management": {"edits": [self._odd({"type": "clear_thinking_20251015"})]},
            "max_tokens": rng.choice((0, 1, self._most_tokens)),
        }
        return {"messages": self._turns(), **self._fields(), **self._some(about, rng.choice((0, 1, 2, 4)))}

    def _anthropic_tool(self) -> Any:
        kind = self._rng.choice((None, "custom", "web_search_20250305", "bash_20250124", "mcp_toolset"))
        schema = {} if kind not in (None, "custom") else {"input_schema": self._odd(self._schema(2))}
        return self._odd({"type": kind, "name": self._odd("f"), **schema})

    def _anthropic_format(self) -> Any:
        return {"type": self._odd("json_schema"), "schema": self._schema(2)}

    def _turns(self) -> Any:
        if self._is_odd(0.1):
            return self._any(3)
        turns = []
        for _ in range(self._rng.choice((0, 1, 1, 2, 3, 30))):
            role = self._pick(("user", "assistant", "system"), ("tool",))
            kinds = _SAID_BLOCKS if role == "assistant" else _BLOCKS
            turns.append(self._odd({"role": self._odd(role), "content": self._blocks(2, kinds)}))
        return turns if self._is_odd(0.5) else [*turns, {"role": "user", "content": "a"}]

    def _blocks(self, depth: int, kinds: Sequence[str] = ("text",)) -> Any:
        if self._rng.random() < 0.3:
            return self._rng.choice(TEXTS)
        return self._odd([self._block(depth, kinds) for _ in range(self._rng.randint(0, 3))])

    def _block(self, depth: int, kinds: Sequence[str] = ("text",)) -> Any:
        block = {
            "type": self._odd(self._pick(kinds, _ODD_BLOCKS)),
            "text": self._rng.choice(TEXTS),
            "thinking": self._rng.choice(TEXTS),
            "id": "a",
            "name": "f",
            "tool_use_id": "a",
            "input": self._pick(({}, {"a": self._any(2)}), (self._any(2),)),
            "content": self._blocks(depth - 1) if depth else "a",
            "source": {"type": self._rng.choice(("text", "content", "base64")), "data": self._odd("a"), "content": "b"},
            "is_error": self._truth(),
        }
        return self._spoiled(block)

    def _tokenize(self) -> dict[str, Any]:
        switches = ("add_special", "parse_special", "with_pieces")
        return {"content": self._prompt(), **{name: self._odd(True) for name in switches if self._rng.random() < 0.5}}

    def _detokenize(self) -> dict[str, Any]:
        return {"tokens": self._odd([self._rng.choice((*range(9), *NUMBERS[:16])) for _ in range(5)])}

    def _control(self) -> dict[str, Any]:
        return {"id": self._odd("chatcmpl-1"), "action": self._odd("reasoning_end")}

    def _fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"n_predict": self._rng.randint(0, self._most_tokens)}
        names = self._names if self._oddness else sorted(_OWN)
        for name in self._rng.sample(names, self._pick((0, 0, 1, 2), (1, 2, 3, 8))):
            make = _OWN.get(name)
            fields[name] = make(self) if make is not None and not self._is_odd(0.2) else self._any(2)
        if self._is_odd(0.05):
            fields[self._rng.choice(TEXTS)] = self._any(2)
        return fields

    def _prompt(self) -> Any:
        rng, draw = self._rng, self._rng.random()
        if draw < 0.4:
            return rng.choice(TEXTS)
        if draw < 0.55:
            return [rng.randrange(4096) for _ in range(rng.randint(0, 20))]
        if draw < 0.7:
            return [rng.choice((rng.randrange(300), rng.choice(TEXTS))) for _ in range(rng.randint(0, 6))]
        if draw < 0.8:
            return [self._prompt() for _ in range(rng.choice((1, 2, 3, 16, 17)))]
        if draw < 0.87:
            pictures = {"multimodal_data": self._any(1)} if self._truth() else {}
            return {"prompt_string": self._odd("abc"), **pictures}
        if draw < 0.9:
            return _LONG
        return self._any(3)

    def _messages(self) -> Any:
        if self._is_odd(0.1):
            return self._any(3)
        ends = [] if self._is_odd(0.5) else [{"role": "user", "content": "a"}]
        return [self._message() for _ in range(self._rng.choice((0, 1, 1, 2, 3, 30)))] + ends

    def _message(self) -> Any:
        if self._is_odd(0.05):
            return self._any(2)
        message: dict[str, Any] = {"role": self._odd(self._pick(_ROLES[:4], _ROLES)), "content": self._content()}
        for name in self._rng.sample(_KEYS, self._pick((0,), (0, 0, 1, 2))):
            message[name] = self._any(3)
        return message

    def _content(self) -> Any:
        draw = self._rng.random()
        if draw < 0.6:
            return self._rng.choice(TEXTS)
        if draw < 0.8:
            parts = ("text", "image_url", "input_audio", "refusal", "thinking", "")
            return [
                {"type": self._odd(self._pick(("text",), parts)), "text": self._odd("hello")}
                for _ in range(self._rng.randint(0, 3))
            ]
        return _LONG if draw < 0.82 else self._odd("a")

    def _odd(self, value: Any) -> Any:
        """Return a value, or at times something else."""
        return self._any(2) if self._rng.random() < self._oddness else value

    def _some(self, about: Mapping[str, Any], count: int) -> dict[str, Any]:
        """Return some fields, at times with something else in the place of their values."""
        return {name: self._odd(about[name]) for name in self._rng.sample(sorted(about), count)}

    def _spoiled(self, item: dict[str, Any]) -> Any:
        """Return an object, in bodies that are not sound at times with other values, or something else."""
        for name in self._rng.sample(sorted(item), self._pick((0,), (0, 1, 5))):
            item[name] = self._any(2)
        return self._odd(item)

    def _is_odd(self, share: float) -> bool:
        """Return whether something is to be wrong here, which it is in this share of the bodies that are not sound."""
        return self._oddness > 0 and self._rng.random() < share

    def _pick(self, sound: Sequence[Any], odd: Sequence[Any]) -> Any:
        return self._rng.choice(odd if self._is_odd(0.5) else sound)

    def _any(self, depth: int) -> Any:
        """Return anything that JSON has."""
        draw = self._rng.random()
        if depth and draw < 0.15:
            return [self._any(depth - 1) for _ in range(self._rng.randint(0, 4))]
        if depth and draw < 0.3:
            return {self._rng.choice(TEXTS): self._any(depth - 1) for _ in range(self._rng.randint(0, 4))}
        if draw < 0.6:
            return self._rng.choice(NUMBERS)
        return self._rng.choice((True, False, None)) if draw < 0.75 else self._rng.choice(TEXTS)

    def _biases(self) -> Any:
        rng = self._rng
        tokens = [rng.choice((rng.randrange(4200), rng.choice(TEXTS))) for _ in range(rng.choice((0, 1, 2, 40)))]
        pairs = [(token, rng.choice((*NUMBERS, False))) for token in tokens]
        return [list(pair) for pair in pairs] if self._truth() else {str(token): bias for token, bias in pairs}

    def _stops(self) -> Any:
        return [self._rng.choice(TEXTS) for _ in range(self._rng.choice((0, 1, 4, 64, 65)))]

    def _paths(self) -> Any:
        return [self._rng.choice((*_PATHS, *TEXTS)) for _ in range(self._rng.randint(0, 5))]

    def _speculative(self) -> Any:
        fields = {
            "enabled": True,
            "off": False,
            "policy": self._rng.choice(("auto", "fixed", "plain")),
            "drafters": self._rng.choice((["suffix"], ["draft", "suffix"], "lookup", [], "", "none")),
            "draft_max": self._rng.choice(NUMBERS),
            "draft_min": self._rng.choice(NUMBERS),
            "p_min": self._rng.choice(NUMBERS),
            "verify": self._rng.choice(("coupled", "rejection")),
        }
        return self._some(fields, self._rng.randint(0, 4))

    def _schema(self, depth: int) -> Any:
        """Return something that is mostly a JSON schema."""
        rng = self._rng
        if not depth or rng.random() < 0.1:
            return self._odd(rng.choice(({}, True, False, {"type": "string"}, {"enum": [1, "a"]}, {"$ref": "#"})))
        parts: dict[str, Any] = {
            "type": rng.choice(("object", "array", "string", "integer", ["null", "number"], "hiccup")),
            "properties": {rng.choice(TEXTS): self._schema(depth - 1) for _ in range(rng.randint(0, 3))},
            "required": rng.sample(TEXTS, rng.randint(0, 2)),
            "items": self._schema(depth - 1),
            "anyOf": [self._schema(depth - 1) for _ in range(rng.randint(0, 3))],
            "allOf": [self._schema(depth - 1) for _ in range(rng.randint(0, 2))],
            "not": {},
            "pattern": rng.choice(("a*", "(a|a)*b", "(", "(?=a)", "a{1000000}")),
            "format": rng.choice(("date", "nonsense")),
            "multipleOf": rng.choice(NUMBERS),
            "minLength": rng.choice(NUMBERS),
            "maxItems": rng.choice(NUMBERS),
        }
        return self._some(parts, rng.randint(1, 4))

    def _grammar(self) -> Any:
        return self._rng.choice(_GRAMMARS)

    def _pattern(self) -> Any:
        return self._rng.choice(_PATTERNS)

    def _format(self) -> Any:
        schema = self._schema(3)
        return self._rng.choice(
            (
                {"type": "text"},
                {"type": "json_object"},
                {"type": "json_object", "schema": schema},
                {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
                {"type": "json_schema"},
            )
        )

    def _number(self) -> Any:
        return self._rng.choice(NUMBERS)

    def _truth(self) -> Any:
        return self._rng.random() < 0.5


_OWN: Final[Mapping[str, Callable[[Bodies], Any]]] = {
    "logit_bias": Bodies._biases,
    "stop": Bodies._stops,
    "response_fields": Bodies._paths,
    "speculative": Bodies._speculative,
    "speculative.n_max": Bodies._number,
    "speculative.p_min": Bodies._number,
    "response_format": Bodies._format,
    "json_schema": lambda bodies: bodies._schema(3),
    "grammar": Bodies._grammar,
    "guided_json": lambda bodies: bodies._schema(2),
    "guided_grammar": Bodies._grammar,
    "guided_regex": Bodies._pattern,
    "guided_choice": lambda bodies: bodies._rng.sample(TEXTS, bodies._rng.randint(0, 3)),
    "structured_outputs": lambda bodies: {"regex": bodies._pattern(), **({"json": {}} if bodies._truth() else {})},
    "samplers": lambda bodies: bodies._rng.choice(("", "kpmt", "tttt", ["top_k", "temperature"], ["dry"], "z", [""])),
    "n": lambda bodies: bodies._rng.choice((1, 2, 4, 16, 17)),
    "n_cmpl": lambda bodies: bodies._rng.choice((1, 2, 3)),
    "stream_options": lambda bodies: {"include_usage": bodies._truth()},
    "logprobs": lambda bodies: bodies._rng.choice((0, 1, 5, True, False, 1000, 1001)),
    "top_logprobs": lambda bodies: bodies._rng.choice((0, 1, 5, 20, 1000, 1001)),
    "sse_ping_interval": Bodies._number,
    "t_max_predict_ms": Bodies._number,
    "cache_salt": lambda bodies: bodies._rng.choice(TEXTS),
    "reasoning_budget_tokens": Bodies._number,
    "reasoning_effort": lambda bodies: bodies._rng.choice(TEXTS),
    "reasoning_format": lambda bodies: bodies._rng.choice(("none", "auto", "deepseek", "x")),
    **dict.fromkeys(
        (
            *("stream", "echo", "verbose", "return_tokens", "return_progress", "timings_per_token", "cache_prompt"),
            *("post_sampling_probs", "ignore_eos", "add_generation_prompt", "continue_final_message"),
        ),
        Bodies._truth,
    ),
}
"""Fields with values that may work, and what makes them."""
