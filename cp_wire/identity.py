"""Who speaks: the protocol's version and the id of one life of a process."""

import secrets

PROTOCOL_VERSION = "2"
"""Raised with every change that an older peer would misread; peers of another version are refused."""


def new_instance() -> str:
    """16 random hexadecimal digits: tells a restarted process from its former life."""
    return secrets.token_hex(8)
