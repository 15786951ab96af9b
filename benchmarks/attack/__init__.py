"""Attacks by the thousand, on the server beside a client that is not to notice, and on everything that reads files."""
