"""Computes the tables that are not measured: ``python docs/compute_results.py``.

They are what models take of memory, by a formula, the most that an answer can lose, by the ledger's own constants, and
what becomes of llama-server's flags, by the server's own list.
``--check`` writes nothing, and ends with status 1 where a file would change.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from paceline.cli.llama_flags import FOREIGN
from paceline.planning.auto.exploration import PROMISING_CATCH_UP_SHARE
from paceline.planning.auto.ledger import ALLOWED_SHARE
from paceline.planning.auto.policy import COUNTERFACTUAL_ROUNDS, START_ROUNDS, START_SHARE

RESULTS = Path(__file__).parent / "results"

ANSWER = 300
"""Tokens of the answer in the worked example."""

Q4_0_BITS, Q8_0_BITS, Q2_K_BITS = 4.5, 8.5, 2.625
"""Bits a weight: in Q4_0 and Q8_0 32 weights share a scale of 16 bits; Q2_K has blocks of 256 weights in 84 bytes."""

Q4_K_M_BITS = 4.9
"""Bits a weight of a mixture of types: those of Llama 3.1 8B, by the README of llama.cpp's quantize."""

CACHE_BYTES, CONTEXT = 2, 4096
"""Bytes of a number in the cache (F16), and the tokens that a draft is given by default."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model, as its publisher describes it.

    Attributes:
        billions: parameters.
        layers: attention layers; 0 where they are of several kinds, so that the formula does not hold.
        heads: heads of keys and values.
        size: numbers in each.
    """

    name: str
    billions: float
    layers: int = 0
    heads: int = 0
    size: int = 0


DRAFTS = (
    Shape("Qwen2.5-Coder-0.5B-Instruct", 0.49, 24, 2, 64),
    Shape("Qwen3-0.6B", 0.6, 28, 8, 128),
    Shape("Qwen3.5-0.8B", 0.8),
    Shape("gemma-3-1b-it", 1.0),
    Shape("Llama-3.2-1B-Instruct", 1.23, 16, 8, 64),
    Shape("DeepSeek-R1-Distill-Qwen-1.5B", 1.78, 28, 2, 128),
    Shape("Ministral-3-3B-Instruct-2512", 3.4),
    Shape("gemma-4-E2B-it", 5.1),
)

PAIRS = (
    (Shape("Qwen2.5-Coder-7B", 7.62, 28, 4, 128), "Qwen2.5-Coder-0.5B-Instruct"),
    (Shape("Llama 3.1 8B", 8.03, 32, 8, 128), "Llama-3.2-1B-Instruct"),
    (Shape("Qwen3-8B", 8.19, 36, 8, 128), "Qwen3-0.6B"),
    (Shape("DeepSeek-R1-Distill-Qwen-14B", 14.8, 48, 8, 128), "DeepSeek-R1-Distill-Qwen-1.5B"),
    (Shape("Qwen3-32B", 32.8, 64, 8, 128), "Qwen3-0.6B"),
    (Shape("Llama 3.3 70B", 70.6, 80, 8, 128), "Llama-3.2-1B-Instruct"),
)
"""Targets whose layers are all of one kind, and the drafts that the page names for them."""

TARGETS = (("8B", 8.0), ("14B", 14.0), ("27B", 27.0), ("32B", 32.0), ("70B", 70.0))


def weights_gb(billions: float, bits: float) -> float:
    """Return what weights take, in GB (10^9 bytes)."""
    return billions * bits / 8


def cache_mb(shape: Shape) -> float:
    """Return what keys and values of a full context take, in MB (10^6 bytes)."""
    return 2 * shape.layers * shape.heads * shape.size * CACHE_BYTES * CONTEXT / 1e6


def draft_memory() -> dict[str, Any]:
    """Return the table of draft models."""
    return _table(
        ["draft model", "parameters, billions", "in Q8_0, GB", "in Q4_0, GB", f"cache of {CONTEXT:,} tokens, MB"],
        [
            [
                shape.name,
                f"{shape.billions:g}",
                f"{weights_gb(shape.billions, Q8_0_BITS):.2f}",
                f"{weights_gb(shape.billions, Q4_0_BITS):.2f}",
                f"{cache_mb(shape):.0f}" if shape.layers else None,
            ]
            for shape in DRAFTS
        ],
        [
            "Computed. Weights take parameters times bits a weight over 8: 8.5 bits in Q8_0, 4.5 in Q4_0. The cache "
            "takes 2 times layers, heads, numbers a head, bytes a number and tokens. It is left open where layers are "
            "of several kinds. A real file differs by some per cent, as its embeddings may be of another type."
        ],
    )


def pair_memory() -> dict[str, Any]:
    """Return the table of what target, draft and both caches take together."""
    drafts = {shape.name: shape for shape in DRAFTS}
    rows = []
    for target, name in PAIRS:
        draft = drafts[name]
        parts = [
            weights_gb(target.billions, Q4_K_M_BITS),
            cache_mb(target) / 1e3,
            weights_gb(draft.billions, Q8_0_BITS),
            cache_mb(draft) / 1e3,
        ]
        rows.append([target.name, name, *(f"{part:.1f}" for part in parts), f"{sum(parts):.1f}"])
    return _table(
        ["target in Q4_K_M", "draft in Q8_0", "target, GB", "its cache, GB", "draft, GB", "its cache, GB", "all, GB"],
        rows,
        [
            f"Computed as above, with {Q4_K_M_BITS} bits a weight in Q4_K_M and {CONTEXT:,} tokens of context. "
            "Twice the context takes twice the caches. Buffers of a pass take some hundred MB more. "
            "`paceline serve` holds one context of this length for each of its `-np` requests."
        ],
    )


def own_draft_memory() -> dict[str, Any]:
    """Return the table of targets' own copies."""
    return _table(
        ["target", "its copy in Q4_0, GB", "its copy in Q2_K, GB"],
        [
            [name, f"{weights_gb(billions, Q4_0_BITS):.1f}", f"{weights_gb(billions, Q2_K_BITS):.1f}"]
            for name, billions in TARGETS
        ],
        ["Computed as above, with 2.625 bits a weight in Q2_K."],
    )


def credited_rounds(tokens: int) -> float:
    """Return the most plain rounds that counterfactual credit can add in an answer of so many tokens.

    Each grant needs twice the proven gain of the one before, and adds half as much. Gains are of tokens that were said,
    so all of them together are at most the answer.
    """
    added, needed, scale = 0.0, 0.0, 1.0
    while needed + COUNTERFACTUAL_ROUNDS * scale <= tokens:
        needed += COUNTERFACTUAL_ROUNDS * scale
        added += START_ROUNDS / scale
        scale *= 2
    return added


def bound(tokens: int) -> list[tuple[str, float]]:
    """Return the parts of the most plain rounds that an answer can lose."""
    return [
        ("to begin with", min(START_ROUNDS, START_SHARE * tokens)),
        (f"{ALLOWED_SHARE:.1%} of {tokens}".replace("%", " %"), ALLOWED_SHARE * tokens),
        ("drafts held back that looked good", credited_rounds(tokens)),
        (
            f"reading the prompt: {PROMISING_CATCH_UP_SHARE:.0%} of {tokens}".replace("%", " %"),
            PROMISING_CATCH_UP_SHARE * tokens,
        ),
    ]


def bound_table() -> dict[str, Any]:
    """Return the worked example of the promise."""
    parts = bound(ANSWER)
    rows, total = [], 0.0
    for name, rounds in parts:
        total += rounds
        rows.append([name, f"{rounds:.1f}", f"{total:.1f}", f"{100 * total / ANSWER:.1f} %"])
    return _table(["may be lost", "plain rounds", "all together", f"of {ANSWER} tokens"], rows, [])


def llama_flags(*, refused: bool) -> dict[str, Any]:
    """Return the table of llama-server's flags that are refused, or of those that change nothing here."""
    names: dict[tuple[str, str], list[str]] = {}
    for name, flag in FOREIGN.items():
        if flag.refused == refused:
            names.setdefault((flag.why, ", ".join(flag.neutral)), []).append(f"`{name}`")
    rows = [[", ".join(flags), neutral, why] for (why, neutral), flags in names.items()]
    columns = ["flags", "taken with", "what there is instead"]
    return _table(columns, rows, []) if refused else _table(["flags", "why"], [[row[0], row[2]] for row in rows], [])


def _table(columns: list[str], rows: list[list[Any]], notes: list[str]) -> dict[str, Any]:
    return {"machine": "", "date": "", "commands": [], "notes": notes, "columns": columns, "rows": rows}


def written(table: dict[str, Any]) -> str:
    """Return the text of a file of results: a row a line."""
    head = ",\n".join(f'  "{key}": {json.dumps(value)}' for key, value in table.items() if key != "rows")
    rows = ",\n".join(f"    {json.dumps(row)}" for row in table["rows"])
    return f'{{\n{head},\n  "rows": [\n{rows}\n  ]\n}}\n'


TABLES = {
    "draft-memory": draft_memory,
    "pair-memory": pair_memory,
    "own-draft-memory": own_draft_memory,
    "bound": bound_table,
    "llama-flags-refused": partial(llama_flags, refused=True),
    "llama-flags-taken": partial(llama_flags, refused=False),
}


def main(arguments: list[str]) -> int:
    """Write all computed tables; return the exit status."""
    if arguments not in ([], ["--check"]):
        print(f"{' '.join(arguments)}: the only option is --check", file=sys.stderr)
        return 2
    stale = []
    for name, compute in TABLES.items():
        path, new = RESULTS / f"{name}.json", written(compute())
        if not path.exists() or path.read_text(encoding="utf-8") != new:
            stale.append(path.name)
            if not arguments:
                path.write_text(new, encoding="utf-8")
    for name in stale:
        print(f"docs/results/{name}: {'is not' if arguments else 'now'} as it is computed")
    return 1 if stale and arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
