"""API keys: the check that asks for one, and the namespaces that keep the caches of their owners apart."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Final

from starlette.datastructures import Headers
from starlette.types import Scope

from paceline.core.errors import InputError
from paceline.serving.errors import RefusedError

_NAMESPACE_BYTES: Final = 16


class ApiKeys:
    """The keys that open the server. Neither a key nor anything that a key could be told from is shown or stored.

    All digests are made with a secret of this process: they mean nothing in another one.
    """

    def __init__(self, keys: Iterable[str] = ()) -> None:
        """Take the keys. No key at all means that the server is open.

        Args:
            keys: each at least one character, none of them a control character.

        Raises:
            InputError: a key is empty, or has a control character, which no header can carry.
        """
        self._secret = secrets.token_bytes(32)
        distinct = dict.fromkeys(keys)
        for number, key in enumerate(distinct, start=1):
            if not key or not key.isprintable():
                raise InputError(
                    f"API key {number} of {len(distinct)} is empty or has a control character: "
                    "use letters, digits and punctuation"
                )
        self._digests = tuple(self._digest(b"key", key.encode()) for key in distinct)

    @classmethod
    def from_options(cls, lists: Iterable[str] = (), files: Iterable[Path] = ()) -> ApiKeys:
        """Return the keys of ``--api-key`` and ``--api-key-file``.

        Args:
            lists: keys with commas between them. Blanks around a key do not belong to it.
            files: UTF-8 texts with one key a line. Empty lines are skipped, and so are those that start with ``#``.

        Raises:
            InputError: a file cannot be read; a list or file has no key, which would leave the server open; or a key
                cannot be used.
        """
        keys: list[str] = []
        for given in lists:
            found = [key.strip() for key in given.split(",") if key.strip()]
            if not found:
                raise InputError("--api-key holds no key: give one, or leave the option out to serve without keys")
            keys += found
        for path in files:
            found = [line.strip() for line in _read_text(path).splitlines()]
            found = [line for line in found if line and not line.startswith("#")]
            if not found:
                raise InputError(f"--api-key-file {path} holds no key: write one a line, or leave the option out")
            keys += found
        return cls(keys)

    def __len__(self) -> int:
        return len(self._digests)

    def __repr__(self) -> str:
        return f"ApiKeys({len(self)} keys)"

    def accepts(self, credential: bytes) -> bool:
        """Return whether a credential is one of the keys.

        The time taken tells nothing of the keys: digests are compared in constant time, all of them always.

        Args:
            credential: as it came with the request.
        """
        digest = self._digest(b"key", credential)
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(matches)

    def namespace(self, credential: bytes | None) -> str:
        """Return the namespace of whoever has this key: the same for the same key, as long as this object lives.

        Args:
            credential: a key that is accepted; ``None`` for requests without one.
        """
        kind, value = (b"nobody", b"") if credential is None else (b"somebody", credential)
        return self._digest(kind, value)[:_NAMESPACE_BYTES].hex()

    def _digest(self, purpose: bytes, value: bytes) -> bytes:
        return blake2b(value, key=self._secret, person=purpose, digest_size=32).digest()


def set_namespace(scope: Scope, namespace: str) -> None:
    """Keep the namespace of a request for the routes."""
    scope.setdefault("state", {})["namespace"] = namespace


def get_namespace(scope: Scope, cache_salt: str | None = None) -> str:
    """Return the namespace that a request may share cached prompts and n-gram history within.

    Args:
        scope: of a request that passed the check of keys.
        cache_salt: parts one namespace further: requests share only with those of the same key *and* salt.
    """
    namespace: str = scope["state"]["namespace"]
    if cache_salt is None:
        return namespace
    # JSON can spell half a surrogate pair, which plain UTF-8 refuses.
    salt = cache_salt.encode("utf-8", "surrogatepass")
    return blake2b(salt, key=namespace.encode(), digest_size=_NAMESPACE_BYTES).hexdigest()


def _read_text(path: Path) -> str:
    try:
        return path.read_text("utf-8-sig")
    except OSError as error:
        raise InputError(f"cannot read --api-key-file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"--api-key-file {path} is not UTF-8: write the keys as plain text, one a line") from None


_SCHEME: Final = b"bearer "


class KeyCheck:
    """Refuses what has no key and needs one, and gives each request its namespace.

    Args:
        keys: the keys; with none of them everything is let through.
        public_paths: may be read (GET, HEAD) without a key.
    """

    def __init__(self, keys: ApiKeys, public_paths: frozenset[str]) -> None:
        self._keys = keys
        self._public_paths = public_paths

    def __call__(self, scope: Scope) -> None:
        """Check one request, and give it its namespace."""
        credentials = _credentials(Headers(scope=scope))
        accepted = [credential for credential in credentials if self._keys.accepts(credential)]
        if not (accepted or not self._keys or self._is_public(scope)):
            what = "the key of this request is not known here" if credentials else "this request has no key"
            message = f"Invalid API Key: {what}; send 'Authorization: Bearer KEY' or 'X-Api-Key: KEY'"
            raise RefusedError(401, "authentication_error", message)
        set_namespace(scope, self._keys.namespace(accepted[0] if accepted else None))

    def _is_public(self, scope: Scope) -> bool:
        return scope["method"] in ("GET", "HEAD") and scope["path"] in self._public_paths


def _credentials(headers: Headers) -> list[bytes]:
    """Return what may be a key, the one of ``Authorization`` first.

    llama-server takes a key without the word Bearer too.
    """
    values = [value.encode("latin-1") for name in ("authorization", "x-api-key") for value in headers.getlist(name)]
    keys = [value[len(_SCHEME) :] if value[: len(_SCHEME)].lower() == _SCHEME else value for value in values]
    return [key.strip() for key in keys if key.strip()]
