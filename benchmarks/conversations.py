"""Ten conversations of two turns each, half of which ask for text that was said before."""

from __future__ import annotations

from typing import Final, NamedTuple


class Conversation(NamedTuple):
    """What a user says.

    Attributes:
        name: for tables.
        copies: whether most of the answers was said before.
        turns: messages of the user.
    """

    name: str
    copies: bool
    turns: tuple[str, ...]


_PARAGRAPH = """The harbour of Lindow was built in three stages. The first quay, of oak, was finshed in 1842 and burned
in the same winter. The second, of granite, took eleven yeras and is still in use. The third was added after the railway
came, so that coal could be loded from the trains without carts. Today the granite quay belongs to the fishing fleet,
and the third is a market on saturdays."""

_CODE = """def mean_of_rows(rows):
    totals = []
    for row in rows:
        total = 0
        for value in row:
            total = total + value
        totals.append(total / len(row))
    return totals


def largest_of_rows(rows):
    largest = []
    for row in rows:
        best = row[0]
        for value in row:
            if value > best:
                best = value
        largest.append(best)
    return largest"""

_JSON = """[
  {"name": "north gate", "opens": "06:00", "closes": "22:00", "lift": true},
  {"name": "south gate", "opens": "07:30", "closes": "21:00", "lift": false},
  {"name": "market gate", "opens": "05:00", "closes": "23:30", "lift": true},
  {"name": "river gate", "opens": "08:00", "closes": "20:00", "lift": false}
]"""

_LIST = """- mend the rope of the bell in the east tower
- count the chairs in the small hall and write the number on the door
- ask the baker whether the ovens can be used on friday
- bring the lamps from the cellar to the garden
- paint the gate green, and the posts beside it white"""

_LOG = """2031-04-02 06:14:09 pump-3 pressure 2.41 bar ok
2031-04-02 06:14:39 pump-3 pressure 2.40 bar ok
2031-04-02 06:15:09 pump-3 pressure 1.87 bar low
2031-04-02 06:15:39 pump-3 pressure 1.52 bar low
2031-04-02 06:16:09 pump-3 pressure 2.38 bar ok"""

CONVERSATIONS: Final = (
    Conversation("capitals", False, ("The capital of France is?", "And what is the city known for?")),
    Conversation("story", False, ("Write a short story about a lighthouse keeper.", "Now give it another ending.")),
    Conversation("explain", False, ("Explain how a refrigerator works.", "And why does its back get warm?")),
    Conversation("plan", False, ("Plan a week of simple dinners for two.", "What do I have to buy for it?")),
    Conversation("opinion", False, ("Is it better to rise early or late?", "Say the same in one sentence.")),
    Conversation(
        "typos",
        True,
        (
            f"Correct the spelling in this text, and change nothing else:\n\n{_PARAGRAPH}",
            "Repeat the corrected text word for word.",
        ),
    ),
    Conversation(
        "code",
        True,
        (
            f"Rename the variable `value` to `number` in this code, and print all of it:\n\n```python\n{_CODE}\n```",
            "Add a docstring to each function and print the whole code again.",
        ),
    ),
    Conversation(
        "json",
        True,
        (
            f'Add the field "guarded": true to each gate and print the whole list:\n\n{_JSON}',
            'Print the list again without the field "lift".',
        ),
    ),
    Conversation(
        "list",
        True,
        (f"Number the items of this list, and keep their words:\n\n{_LIST}", "Print the list in the opposite order."),
    ),
    Conversation(
        "log",
        True,
        (f"Print these lines again, without the dates:\n\n{_LOG}", "Print only the lines that say low."),
    ),
)
