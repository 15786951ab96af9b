"""Everything between the socket and the routes: who may use the server, and how much one request may take.

:func:`secured` puts all of it in front of an application, and :func:`socket_options` sets up the socket below.
"""

from paceline.serving.security.answer_headers import request_id_of
from paceline.serving.security.api_keys import ApiKeys, namespace_of
from paceline.serving.security.assembly import secured, socket_options
from paceline.serving.security.cors import CorsPolicy
from paceline.serving.security.json_bodies import PIECE_BYTES, BodyError, read_json
from paceline.serving.security.loopback import open_warning
from paceline.serving.security.settings import SecuritySettings
from paceline.serving.security.tls import TlsFiles

__all__ = [
    "PIECE_BYTES",
    "ApiKeys",
    "BodyError",
    "CorsPolicy",
    "SecuritySettings",
    "TlsFiles",
    "namespace_of",
    "open_warning",
    "read_json",
    "request_id_of",
    "secured",
    "socket_options",
]
