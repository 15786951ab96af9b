"""What tests of commands share."""

from tests.cli.invoking import invoke, refused

__all__ = ["invoke", "refused"]
