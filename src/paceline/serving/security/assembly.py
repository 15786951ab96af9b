"""All layers in their order, and the settings of the socket below them.

::

    socket       uvicorn: TLS, size and time of headers, time to read; who yields where there are too many connections
      Front           no websockets
      AnswerHeaders   id of the request, nosniff
      AccessLog       one line for each request, refused ones included
      Cors            preflights; which pages may read answers and refusals
      HostCheck       names of this server
      OriginCheck     no foreign pages
      KeyCheck        API keys; namespace of the request
      BodyReader      size and time of the body, which nobody without a key gets read
      RequestLimit    how many are under way, bodies on their way not counted
    routes
"""

from __future__ import annotations

from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.serving.security.access_log import AccessLog
from paceline.serving.security.answer_headers import AnswerHeaders
from paceline.serving.security.body_reader import BodyReader
from paceline.serving.security.cors import Cors
from paceline.serving.security.deadlines import protocol_with_limits
from paceline.serving.security.host_check import HostCheck
from paceline.serving.security.key_check import KeyCheck
from paceline.serving.security.origin_check import OriginCheck
from paceline.serving.security.refusals import Refused, tell_refusals
from paceline.serving.security.request_limit import RequestLimit
from paceline.serving.security.settings import SecuritySettings


def secured(app: ASGIApp, settings: SecuritySettings, refused: Refused | None = None) -> ASGIApp:
    """Return an application behind everything that a request has to pass.

    Args:
        app: the routes.
        settings: who may use them.
        refused: hears of each request that no route sees.
    """
    routes = app
    keys_differ = bool(settings.keys)
    app = RequestLimit(app, most=settings.max_connections, keys_differ=keys_differ)
    app = BodyReader(
        app,
        max_body_bytes=settings.max_body_bytes,
        body_timeout_s=settings.body_timeout_s,
        keys_differ=keys_differ,
    )
    app = KeyCheck(app, keys=settings.keys, public_paths=settings.public_paths)
    if not settings.keys:
        app = OriginCheck(app, cors=settings.cors)
    if settings.checks_hosts:
        app = HostCheck(app, allowed_hosts=settings.allowed_hosts)
    if settings.cors.origins:
        app = Cors(app, policy=settings.cors)
    app = AccessLog(app, quiet_paths=settings.quiet_paths)
    app = AnswerHeaders(app)
    return Front(app, lifespan=routes, refused=refused)


def socket_options(settings: SecuritySettings) -> dict[str, Any]:
    """Return what :class:`uvicorn.Config` has to be given beside the application and the address."""
    options: dict[str, Any] = {
        "http": protocol_with_limits(settings.max_header_bytes, settings.header_timeout_s, settings.read_timeout_s),
        "ws": "none",
        # Of headers the protocol tells first; this is for what else may be incomplete, as trailers.
        "h11_max_incomplete_event_size": settings.max_header_bytes,
        # uvicorn's own log has query strings, and with them keys.
        "access_log": False,
        "server_header": False,
        "proxy_headers": False,
    }
    if settings.tls is not None:
        options |= {"ssl_keyfile": str(settings.tls.key), "ssl_certfile": str(settings.tls.certificate)}
    return options


class Front:
    """Parts what may come: requests, the server's own start and stop, and websockets, which no check below knows."""

    def __init__(self, app: ASGIApp, *, lifespan: ASGIApp, refused: Refused | None) -> None:
        """Put the front before an application.

        Args:
            app: takes requests.
            lifespan: hears of start and stop.
            refused: hears of refusals.
        """
        self._app = app
        self._lifespan = lifespan
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what is not a websocket."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "this server has no websockets"})
        elif scope["type"] == "lifespan":
            await self._lifespan(scope, receive, send)
        else:
            if self._refused is not None:
                tell_refusals(scope, self._refused)
            await self._app(scope, receive, send)
