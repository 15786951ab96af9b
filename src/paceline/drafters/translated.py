"""Drafting with a smaller model whose tokens are other ones than the target's.

The model reads the text in its own tokens (:mod:`paceline.vocabularies.alignment`), and a row of it becomes a row of
the target's tokens (:mod:`paceline.vocabularies.mapping`): every token of the draft counts for the first of its tokens
to the target. From there on a proposal is chosen as any draft model's is, with the noise that the target will use. So
the tree holds target ids, and who judges it need not know of any of this.

After each level all drafted bytes are put into the target's tokens anew::

    drafted by the model      qui           qui | ck            qui | ck | ␣bro
    in the target's tokens    q | ui        quick               quick | ␣bro
                              two nodes     one in their place  one more

So a level adds several nodes, one, or none. What is superseded is taken back from the tree.

A text may end within a token of the draft's: the target said ``wor`` and ``ld`` follows. The model has a token
``world`` and hardly ever says ``ld`` by itself. Where longer tokens outweigh the text's last one in the row before it,
and the target would have begun them with the tokens that it did say, the likeliest stands in for the last one, and what
it adds is proposed first. This is called healing; it needs the row before the last one, and no pass of its own. A space
at the end of the text is healed in any case if it belongs to the next word for the draft: it does not read that space.

A translated row is no distribution that target tokens were drawn from, as retokenizing changes what was drawn. Under
rejection proposals are therefore certain ones (``draft_probs=None``): the likeliest, which are accepted most often.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

import numpy as np

from paceline.core.arrays import FloatArray
from paceline.core.errors import EngineError
from paceline.core.request import Request
from paceline.core.sampling import token_at
from paceline.core.tree import ROOT, Evidence
from paceline.core.verify import Proposal
from paceline.drafters.base import Commit, DraftJob
from paceline.drafters.following import Follower, FollowingDrafter, Rows
from paceline.drafters.rows import Choose, read_row
from paceline.engines.base import Engine
from paceline.engines.sequence_pool import SequencePool
from paceline.vocabularies.alignment import Alignment, CutWord
from paceline.vocabularies.exact_tokens import whole_characters
from paceline.vocabularies.mapping import ProjectedRow, TokenMapping

Case: TypeAlias = Literal["aligned", "split", "merged", "none", "healed", "unreadable"]
"""What became of one level: one node was added (``aligned``), several were (``split``), some were superseded
(``merged``), none was added (``none``); or the text's last token was replaced first (``healed``), or the text did not
come back and there was no level at all (``unreadable``)."""

_MAX_HEALING: Final = 32
"""Longer tokens that may stand in for a text's last one, the likeliest of them."""

_LEVELS_PER_TOKEN: Final = 8
"""Levels for each token that may be drafted, after which a round's drafting ends: the model's tokens may be short."""


@dataclass(slots=True)
class _Chain:
    """What was drafted in one round.

    Attributes:
        context: bytes of the text that the chain is tokenized with; empty but after healing.
        context_ids: their tokens to the target.
        spelled: bytes drafted so far.
        token_ids: they are these tokens of the target's.
        margins: of each of them, how sure the draft was of it.
        held_back: bytes at the text's end that the first token fed begins with.
    """

    context: bytes = b""
    context_ids: Sequence[int] = ()
    spelled: bytes = b""
    token_ids: list[int] = field(default_factory=list)
    margins: list[float | None] = field(default_factory=list)
    held_back: bytes = b""


@dataclass(slots=True)
class _Reader(Follower):
    """How the draft follows one request, and in which tokens.

    Attributes:
        alignment: puts the request's text into the draft's tokens, which are ``text``.
        ahead: tokens at the end of the cache that were drafted, and are not in ``text`` yet.
        known: tokens of ``text`` that the pool was told of; ``None`` before there was a sequence.
        chain: what was drafted in this round.
    """

    alignment: Alignment = field(kw_only=True)
    ahead: list[int] = field(default_factory=list)
    known: int | None = None
    chain: _Chain = field(default_factory=_Chain)


class TranslatedDrafter(FollowingDrafter[_Reader]):
    """Proposes what a smaller model would say whose tokens are others than the target's.

    Args:
        engine: the draft model; closed with the drafter.
        mapping: of the target's and the draft's vocabularies.
        context_length: tokens of its own that the draft sees at most; by default all its engine can hold.
        pool: gives out the engine's sequences; by default one that keeps nothing, so that several drafters may share an
            engine.

    Attributes:
        cases: how often a level ended in each way.

    Raises:
        CapabilityError: the draft model cannot take back tokens that it was fed over several passes.
        InputError: the context is too short, or longer than the engine's.
    """

    # The last token's row, and the row before it, which healing reads.
    _num_fresh = 2

    def __init__(
        self,
        engine: Engine,
        mapping: TokenMapping,
        *,
        context_length: int | None = None,
        pool: SequencePool | None = None,
    ) -> None:
        super().__init__(engine, end_ids=mapping.target.vocabulary.end_ids, context_length=context_length, pool=pool)
        self.cases: Counter[Case] = Counter()
        self._mapping = mapping
        self._most_outputs = engine.capabilities.max_outputs

    # --- following ----------------------------------------------------------------------------------------------------

    def _follow(self, request: Request) -> _Reader:
        alignment = Alignment(self._mapping)
        return _Reader(alignment.draft_ids, alignment=alignment)

    def _catch_up_text(self, follower: _Reader, request: Request) -> bool:
        text, sequence = follower.text, follower.sequence
        length = len(text)
        stands = follower.alignment.follow(request.token_ids)
        if sequence is not None:
            first = follower.start + follower.cached - len(follower.ahead)
            valid = min(stands, first)
            if valid == first:
                valid += _num_common(follower.ahead, text[first:])
            valid = min(valid, len(text) - self._num_fresh)
            if follower.known is None:
                follower.known = length
            if valid < follower.start + follower.cached:
                if valid <= follower.start:
                    follower.start = max(min(follower.start, len(text) - 1), 0)
                    valid = follower.start
                follower.cached = valid - follower.start
                self.pool.trim(sequence, follower.cached)
            follower.ahead.clear()
            if stands < follower.known and follower.start == 0:
                self.pool.hold(sequence, text)
                follower.known = len(text)
        return follower.alignment.is_ready and len(text) > 0

    def _start_round(self, follower: _Reader, job: DraftJob) -> None:
        super()._start_round(follower, job)
        if not follower.alignment.is_ready:
            self.cases["unreadable"] += 1

    def _num_kept(self, follower: _Reader, commit: Commit) -> int:
        if follower.chain.context_ids and not follower.chain.held_back:
            # The first one stands in for a token of the text, and is not part of it.
            return 0
        vocabulary = self._mapping.target.vocabulary
        said = follower.chain.held_back
        for token_id in commit.token_ids:
            piece = vocabulary.token_bytes(token_id)
            if not piece:
                break
            said += piece
        kept, spelled = 0, b""
        for draft_id in follower.fed:
            piece = self.engine.vocabulary.token_bytes(draft_id)
            spelled += piece
            if not piece or not said.startswith(spelled):
                break
            kept += 1
        follower.ahead = follower.fed[:kept]
        return kept

    def _outputs(self, num_tokens: int, num_jobs: int) -> tuple[int, ...]:
        if num_tokens < 2 or 2 * num_jobs > self._most_outputs:
            return (num_tokens - 1,)
        return (num_tokens - 2, num_tokens - 1)

    # --- drafting -----------------------------------------------------------------------------------------------------

    def _propose(self, job: DraftJob, follower: _Reader, rows: Rows) -> bool:
        if follower.drafted is None:
            follower.chain = _Chain()
            healed = self._heal(job, follower, rows)
            if healed is not None:
                return healed
        row = self._mapping.project(rows.last)
        if row is None:
            return False
        proposals, probability = _proposals(job, follower.frontier, row)
        if not proposals:
            return False
        draft_id = row.likeliest(proposals[0].token_id)
        piece = b"".join(map(self._mapping.target.vocabulary.token_bytes, self._mapping.target_tokens(draft_id)))
        return self._add(job, follower, draft_id, piece, proposals, probability)

    def _add(
        self,
        job: DraftJob,
        follower: _Reader,
        draft_id: int,
        piece: bytes,
        proposals: Sequence[Proposal],
        probability: float | None,
    ) -> bool:
        """Add a token of the draft to the chain, and what else was proposed in its place beside it.

        Args:
            draft_id: the token, which is fed next.
            piece: bytes that it adds to what is drafted.
            proposals: target tokens for the place after the frontier; the first is the token's first one.
            probability: the largest of the row.

        Returns:
            Whether the chain can go on.
        """
        chain = follower.chain
        follower.drafted = draft_id
        is_text = len(piece) > 0
        if is_text:
            chain.spelled += piece
            token_ids = self._translate(chain, self._mapping.space_after(piece))
            if token_ids is None:
                return False
        else:
            # A control token: nothing is merged with it.
            token_ids = [*chain.token_ids, *self._mapping.target_tokens(draft_id)]
        end = next((index for index, token_id in enumerate(token_ids) if token_id in self.end_ids), None)
        if end is not None:
            del token_ids[end + 1 :]
        place = len(chain.token_ids)
        num_before = place
        common = _num_common(chain.token_ids, token_ids)
        margin = proposals[0].margin
        if common < place:
            self._supersede(job, chain, common)
            # It stands for tokens that were less sure than the latest one, or more.
            margin = min((m for m in (margin, *chain.margins[common:]) if m is not None), default=None)
            del chain.token_ids[common:], chain.margins[common:]
            place = common
        node = self._node_at(job, chain)
        most = job.budget.max_depth
        for token_id in token_ids[place:most]:
            above = node
            node = job.tree.add(above, token_id, self.name, Evidence(probability, margin=margin))
            if len(chain.token_ids) == num_before and token_id == proposals[0].token_id:
                for other in proposals[1:]:
                    job.tree.add(above, other.token_id, self.name, Evidence(probability, margin=other.margin))
            chain.token_ids.append(token_id)
            chain.margins.append(margin)
        num_added = len(chain.token_ids) - place
        self.cases[
            "merged" if place < num_before else "none" if num_added == 0 else "split" if num_added > 1 else "aligned"
        ] += 1
        follower.frontier = node
        if job.request.verifier.sampler.is_constrained and not self._keep_allowed(job, follower):
            return False
        return is_text and end is None and len(follower.fed) + 1 < _LEVELS_PER_TOKEN * most

    def _translate(self, chain: _Chain, following: bytes) -> list[int] | None:
        """Return the target's tokens of what is drafted and known to follow, a character's beginning left out."""
        whole = chain.context + whole_characters(chain.spelled) + following
        token_ids = self._mapping.target.continuation(whole)
        if token_ids is None or not chain.context:
            return token_ids
        num_context = len(chain.context_ids)
        return token_ids[num_context:] if token_ids[:num_context] == list(chain.context_ids) else None

    def _node_at(self, job: DraftJob, chain: _Chain) -> int:
        """Return the node of a chain's last token. Nodes are numbered anew whenever something is taken back."""
        node = ROOT
        for token_id in chain.token_ids:
            child = job.tree.child(node, token_id)
            assert child is not None
            node = child
        return node

    def _supersede(self, job: DraftJob, chain: _Chain, common: int) -> None:
        """Take back the chain after its first ``common`` tokens, and the runners-up of those that go."""
        kept = _Chain(token_ids=chain.token_ids[:common])
        job.tree.withdraw(self._node_at(job, kept), self.name)

    def _keep_allowed(self, job: DraftJob, follower: _Reader) -> bool:
        """Take back what the request's constraint forbids; return whether that is nothing."""
        tree, chain = job.tree, follower.chain
        allowed = set(job.request.verifier.sampler.allowed_nodes(tree, job.request.token_ids))
        node = ROOT
        for index, token_id in enumerate(chain.token_ids):
            child = tree.child(node, token_id)
            assert child is not None
            if child not in allowed:
                tree.withdraw(node, self.name)
                del chain.token_ids[index:], chain.margins[index:]
                follower.frontier = self._node_at(job, chain)
                return False
            node = child
        return True

    # --- healing ------------------------------------------------------------------------------------------------------

    def _heal(self, job: DraftJob, follower: _Reader, rows: Rows) -> bool | None:
        """Begin with the rest of a token that the text ends within, if it does; return ``None`` if not.

        Else it is what :meth:`_propose` returns.
        """
        cut = follower.alignment.cut_word()
        if cut is None or (not follower.alignment.held_back and follower.cached < 1):
            return None
        row = rows.last if cut.draft_id is None else rows.before_last
        if row is None:
            return None
        own_id = self._mapping.draft_id(cut.spelled) if cut.draft_id is None else cut.draft_id
        own = -np.inf if own_id is None else float(row[own_id])
        longer = self._longer(cut, row, own)
        found = ([], None) if longer is None else _proposals(job, ROOT, longer)
        if longer is None or not found[0]:
            return None if cut.draft_id is not None else self._read_held_back(follower, cut, own_id)
        proposals, probability = found
        draft_id = longer.likeliest(proposals[0].token_id)
        if cut.draft_id is not None:
            assert follower.sequence is not None
            follower.cached -= 1
            self.pool.trim(follower.sequence, follower.cached)
        follower.chain = _Chain(
            cut.before + cut.spelled, cut.target_ids, held_back=cut.spelled if cut.draft_id is None else b""
        )
        self.cases["healed"] += 1
        piece = self.engine.vocabulary.token_bytes(draft_id)[len(cut.spelled) :]
        return self._add(job, follower, draft_id, piece, proposals, probability)

    def _longer(self, cut: CutWord, row: FloatArray, own: float) -> ProjectedRow | None:
        """Return what goes on after a cut, if that outweighs what ends there."""
        longer_ids = self._mapping.extensions(cut.spelled)
        if not len(longer_ids) or _log_weight(row[longer_ids]) <= own:
            return None
        num_said, said = len(cut.target_ids), list(cut.target_ids)
        draft_ids, first_ids = [], []
        for draft_id in longer_ids[np.argsort(-row[longer_ids], kind="stable")[:_MAX_HEALING]]:
            piece = self.engine.vocabulary.token_bytes(int(draft_id))
            token_ids = self._mapping.target.continuation(cut.before + piece + self._mapping.space_after(piece))
            if token_ids is not None and len(token_ids) > num_said and token_ids[:num_said] == said:
                draft_ids.append(int(draft_id))
                first_ids.append(token_ids[num_said])
        if not draft_ids or _log_weight(row[draft_ids]) <= own:
            return None
        return self._mapping.gather(np.array(draft_ids), np.array(first_ids), row[draft_ids])

    def _read_held_back(self, follower: _Reader, cut: CutWord, own_id: int | None) -> bool:
        """Have the draft read the space after all: it is no beginning of a word. Return whether it has a token."""
        if own_id is None:
            return False
        follower.chain = _Chain(held_back=cut.spelled)
        follower.drafted = own_id
        self.cases["none"] += 1
        return True


def _proposals(job: DraftJob, frontier: int, row: ProjectedRow) -> tuple[list[Proposal], float | None]:
    """Return what a row of few tokens proposes, which may all be forbidden; see :func:`read_row`."""
    try:
        proposals, probability = read_row(job, frontier, row.logits, _chooser(job.request))
    except EngineError:
        return [], None
    return [proposal for proposal in proposals if row.logits[proposal.token_id] > -np.inf], probability


def _chooser(request: Request) -> Choose | None:
    """Return what chooses proposals in the request's verifier's place, where that would draw them."""
    if not request.verifier.judges_every_draw:
        return None

    def likeliest(logits: FloatArray, position: int, history: Sequence[int], count: int) -> list[Proposal]:
        candidates = request.verifier.sampler.candidates(logits, history)
        order = np.argsort(-candidates.logits, kind="stable")[:count]
        return [
            Proposal(token_at(candidates, int(index)), None) for index in order if candidates.logits[index] > -np.inf
        ]

    return likeliest


def _log_weight(logits: FloatArray) -> float:
    top = float(logits.max())
    return top + float(np.log(np.exp(logits - top).sum())) if np.isfinite(top) else -np.inf


def _num_common(first: Sequence[int], second: Sequence[int]) -> int:
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count
