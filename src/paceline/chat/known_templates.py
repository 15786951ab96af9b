"""Chat templates by the names that llama.cpp gives them, for models whose file has none, or a wrong one.

Each is the format of a family of models, written down here anew; a begin token comes from the tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_OF_ROLES: Final = (
    "{{% for message in messages %}}{begin}{{{{ message['role'] }}}}{middle}{{{{ message['content'] }}}}{end}"
    "{{% endfor %}}{{% if add_generation_prompt %}}{begin}assistant{middle}{{% endif %}}"
)


def _make_role_template(begin: str, middle: str, end: str) -> str:
    """Return the template of a format in which every message stands between the same marks."""
    return _OF_ROLES.format(begin=begin, middle=middle, end=end)


# What the system says stands before what the user says first.
_SYSTEM_FIRST: Final = (
    "{% set ns = namespace(system='') %}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{% set ns.system = message['content'] %}"
)

KNOWN_TEMPLATES: Final[Mapping[str, str]] = {
    "chatml": _make_role_template("<|im_start|>", "\n", "<|im_end|>\n"),
    "command-r": (
        "{% for message in messages %}<|START_OF_TURN_TOKEN|>"
        "<|{{ {'assistant': 'CHATBOT'}.get(message['role'], message['role'] | upper) }}_TOKEN|>"
        "{{ message['content'] | trim }}<|END_OF_TURN_TOKEN|>{% endfor %}"
        "{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}"
    ),
    "gemma": (
        f"{_SYSTEM_FIRST}{{% else %}}"
        "<start_of_turn>{{ 'model' if message['role'] == 'assistant' else message['role'] }}\n"
        "{% if ns.system and message['role'] == 'user' %}{{ ns.system | trim }}\n\n{% set ns.system = '' %}{% endif %}"
        "{{ message['content'] | trim }}<end_of_turn>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    ),
    "llama2": (
        f"{_SYSTEM_FIRST}{{% elif message['role'] == 'user' %}}[INST] "
        "{% if ns.system %}{{ ns.system }}\n{% set ns.system = '' %}{% endif %}{{ message['content'] }} [/INST]"
        "{% else %}{{ message['content'] }}</s>{% endif %}{% endfor %}"
    ),
    "llama3": (
        "{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
        "{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
    "mistral-v7": (
        "{% for message in messages %}{% if message['role'] == 'system' %}"
        "[SYSTEM_PROMPT] {{ message['content'] }}[/SYSTEM_PROMPT]{% elif message['role'] == 'user' %}"
        "[INST] {{ message['content'] }}[/INST]{% else %} {{ message['content'] }}</s>{% endif %}{% endfor %}"
    ),
    "phi3": _make_role_template("<|", "|>\n", "<|end|>\n"),
    "zephyr": _make_role_template("<|", "|>\n", "<|endoftext|>\n"),
}
"""Templates that come with paceline, by llama.cpp's names."""
