"""Writing a request's answer as text, and taking back what a round that was cut short wrote."""

from __future__ import annotations

from paceline.core.request import Request
from paceline.core.text import TextStream
from paceline.core.vocabulary import Vocabulary


def append_text(request: Request, token_id: int, source: str, vocabulary: Vocabulary) -> None:
    """Add to the answer's text what a token spells, as far as that is final."""
    token_bytes = vocabulary.token_bytes(token_id)
    if not token_bytes and token_id in request.rules.preserved_ids:
        token_bytes = vocabulary.token_spelling(token_id) or b""
    request.segments += request.text.push(token_bytes, source)
    if request.rules.stop and not token_bytes:
        # A stop text may name a control token, which adds no bytes.
        request.segments += request.text.push_control(vocabulary.token_spelling(token_id) or b"", source)


def rollback_text(request: Request, num_tokens: int, vocabulary: Vocabulary) -> None:
    """Go back to where a request stood when it had ``num_tokens`` tokens, and ran; its text is written again."""
    del request.token_ids[num_tokens:]
    del request.sources[request.num_output :]
    del request.logprobs[request.num_output :]
    del request.segment_ends[request.num_output :]
    request.text = TextStream(request.rules.stop)
    request.segments = []
    for token_id, source in zip(request.output_ids, request.sources, strict=True):
        append_text(request, token_id, source, vocabulary)
    request.error = request.finish_reason = None
