"""``python -m tests.words``: old private terms in what a user sees, and in the code; ``--json`` prints the figures."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from tests.words.counting import figures
from tests.words.terms import TERMS

app = typer.Typer(add_completion=False)


@app.command()
def count(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
    places: Annotated[bool, typer.Option("--places", help="List every place, those in the code too.")] = False,
) -> None:
    """Count the planner's old private terms: in what a user sees, and apart from that in the code.

    The exit status is 1 while a user may see one.
    """
    counted = figures()
    if as_json:
        print(json.dumps(counted, indent=2))
    else:
        heads = [term.old.partition(",")[0] for term in TERMS]
        print(f"{'':22}" + "".join(f"{head:>9}" for head in (*heads, "all", "planner")))
        for group in ("users", "code"):
            for where, counts in counted[group].items():
                row = [counts["by_term"].get(term.old, 0) for term in TERMS]
                print(f"{where:22}" + "".join(f"{n:9}" for n in (*row, counts["total"], counts["of_the_planner"])))
        for group in ("users", "code") if places else ("users",):
            for counts in counted[group].values():
                for each in counts["places"]:
                    print(f"{each['place']}: {each['term']}: {each['words'][-80:]}")
        for what in ("entries_that_point_back", "constants_without_a_docstring"):
            print(f"{what.replace('_', ' ')}: {len(counted[what])}")
            for each in counted[what] if places else ():
                print(f"{each['place']}: {each['name']}: {each['text'][:80]}")
    if any(counts["total"] for counts in counted["users"].values()):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
