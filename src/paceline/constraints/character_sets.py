"""What the parts of a GBNF grammar may begin with, and what may follow them: sets of characters, as bits.

Rules refer to one another in circles, so such sets are found for all parts at once. Each part is looked at a few times
however the rules refer to one another: grammars of thousands of rules take tenths of a second.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping

from paceline.constraints.gbnf_parser import Chars, Choice, Node, Ref, Repeat, Sequence, children, walk


class CharacterSets:
    """The sets of all parts of a grammar. Parts are known by their identity, and have to be kept by others.

    Attributes:
        follow: characters that may come after each rule.
        num_bits: of the sets: one for all characters that each class has or lacks together.
    """

    def __init__(self, rules: Mapping[str, Node]) -> None:
        nodes = [node for rule in rules.values() for node in walk(rule)]
        self._nullable = least_fixed_point(rules, characters=False)
        masks, self.num_bits = _class_masks([node for node in nodes if isinstance(node, Chars)])
        first: dict[int, int] = {}
        first_of: dict[int, list[int]] = {}
        follow: dict[int, int] = {}
        follow_of: dict[int, list[int]] = {id(node): [] for node in nodes}
        for node in nodes:
            first[id(node)] = masks.get(id(node), 0)
            first_of[id(node)] = [id(rules[node.name])] if isinstance(node, Ref) else self._leading(node)
        self._first = transitive_unions(first, first_of)
        for node in nodes:
            follow.setdefault(id(node), 0)
            if isinstance(node, Ref):
                follow_of[id(rules[node.name])].append(id(node))
            elif isinstance(node, Repeat):
                follow[id(node.item)] = 0 if node.most == 1 else self.first(node.item)
            following: Node | None = None
            for part in reversed(children(node)):
                if following is None or self.is_nullable(following):
                    follow_of[id(part)].append(id(node if following is None else following))
                if isinstance(node, Sequence):
                    if following is not None:
                        follow[id(part)] = self.first(following)
                    following = part
        found = transitive_unions(follow, follow_of)
        self.follow = {name: found[id(rule)] for name, rule in rules.items()}

    def first(self, node: Node) -> int:
        """Return the characters that a text of a part may begin with."""
        return self._first[id(node)]

    def is_nullable(self, node: Node) -> bool:
        return id(node) in self._nullable

    def add(self, node: Sequence) -> None:
        """Add a sequence of parts that are known."""
        self._first[id(node)] = 0
        for part in self._leading(node):
            self._first[id(node)] |= self._first[part]
        if all(map(self.is_nullable, node.items)):
            self._nullable.add(id(node))

    def followed(self, items: Iterable[Node], after: int) -> list[tuple[Node, int]]:
        """Return parts that follow one another, the last one first, each with what may come after it."""
        found = []
        for item in reversed(list(items)):
            found.append((item, after))
            after = self.first(item) | (after if self.is_nullable(item) else 0)
        return found

    def _leading(self, node: Node) -> list[int]:
        """Return the parts of a part that a text of it may begin with."""
        found = []
        for part in children(node):
            found.append(id(part))
            if isinstance(node, Sequence) and not self.is_nullable(part):
                break
        return found


def least_fixed_point(rules: Mapping[str, Node], *, characters: bool) -> set[int]:
    """Return the parts of which something holds, by identity: as few as can be, where rules refer to one another.

    It holds of a sequence if it does of all its parts, of a choice if it does of one, and of what is repeated, or
    may be left out.

    Args:
        characters: whether it holds of a character and of a token.
    """
    users: dict[int, list[Node]] = {}
    missing: dict[int, int] = {}
    ready: list[Node] = []
    for rule in rules.values():
        for node in walk(rule):
            parts = (rules[node.name],) if isinstance(node, Ref) else children(node)
            match node:
                case Sequence():
                    needed = len(parts)
                case Choice() | Ref():
                    needed = 1
                case Repeat():
                    needed = int(node.least > 0)
                case _:
                    needed = int(not characters)
            missing[id(node)] = needed
            if not needed:
                ready.append(node)
            for part in parts:
                users.setdefault(id(part), []).append(node)
    found = {id(node) for node in ready}
    while ready:
        for user in users.get(id(ready.pop()), ()):
            missing[id(user)] -= 1
            if missing[id(user)] <= 0 and id(user) not in found:
                found.add(id(user))
                ready.append(user)
    return found


def transitive_unions(own: Mapping[int, int], included: Mapping[int, Collection[int]]) -> dict[int, int]:
    """Return the least sets, as bits, each of which has its own bits and all of those that it includes.

    Sets that include one another are equal. They are found first (Gabow, 10.1016/S0020-0190(00)00051-X), so that each
    is added up once.
    """
    found: dict[int, int] = {}
    number: dict[int, int] = {}
    entered: list[int] = []
    borders: list[int] = []
    for root in own:
        path = [] if root in number else [(root, iter(included[root]))]
        while path:
            key, rest = path[-1]
            if key not in number:
                number[key] = len(number)
                entered.append(key)
                borders.append(key)
            for other in rest:
                if other not in number:
                    path.append((other, iter(included[other])))
                    break
                if other not in found:
                    while number[borders[-1]] > number[other]:
                        borders.pop()
            else:
                path.pop()
                if borders[-1] != key:
                    continue
                borders.pop()
                equal = [entered.pop()]
                while equal[-1] != key:
                    equal.append(entered.pop())
                bits = 0
                for each in equal:
                    bits |= own[each]
                    for other in included[each]:
                        bits |= found.get(other, 0)
                found.update(dict.fromkeys(equal, bits))
    return found


def _class_masks(classes: Collection[Chars]) -> tuple[dict[int, int], int]:
    """Return each class as bits, by identity, and the number of bits."""
    unlike = set(classes)
    bounds = sorted({bound for each in unlike for first, last in each.ranges for bound in (first, last + 1)})
    masks = {}
    for each in unlike:
        mask = 0
        for first, last in each.ranges:
            mask |= (1 << bisect_left(bounds, last + 1)) - (1 << bisect_left(bounds, first))
        masks[each] = mask
    return {id(each): masks[each] for each in classes}, len(bounds)
