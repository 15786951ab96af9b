"""The layer that asks for an API key."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.serving.security.api_keys import ApiKeys, keep_namespace
from paceline.serving.security.refusals import refuse
from paceline.serving.security.scopes import header_values

_SCHEME = b"bearer "


class KeyCheck:
    """Lets through what has a key, or needs none, and gives each request its namespace."""

    def __init__(self, app: ASGIApp, *, keys: ApiKeys, public_paths: frozenset[str]) -> None:
        """Put the check in front of an application.

        Args:
            app: the application.
            keys: the keys; with none of them everything is let through.
            public_paths: may be read (GET, HEAD) without a key.
        """
        self._app = app
        self._keys = keys
        self._public_paths = public_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on, or refuse it for its key."""
        credentials = _credentials(scope)
        accepted = [credential for credential in credentials if self._keys.accepts(credential)]
        if accepted or not self._keys or self._is_public(scope):
            keep_namespace(scope, self._keys.namespace(accepted[0] if accepted else None))
            await self._app(scope, receive, send)
            return
        what = "the key of this request is not known here" if credentials else "this request has no key"
        message = f"Invalid API Key: {what}; send 'Authorization: Bearer KEY' or 'X-Api-Key: KEY'"
        challenge = [(b"www-authenticate", b"Bearer")]
        await refuse(scope, receive, send, 401, message, "authentication_error", headers=challenge)

    def _is_public(self, scope: Scope) -> bool:
        return scope["method"] in ("GET", "HEAD") and scope["path"] in self._public_paths


def _credentials(scope: Scope) -> list[bytes]:
    """Return what may be a key, the one of ``Authorization`` first.

    llama-server takes a key without the word Bearer too.
    """
    values = header_values(scope, b"authorization") + header_values(scope, b"x-api-key")
    keys = [value[len(_SCHEME) :] if value[: len(_SCHEME)].lower() == _SCHEME else value for value in values]
    return [key.strip() for key in keys if key.strip()]
