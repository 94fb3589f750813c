"""This host as others see it: who shares memory with its processes, and which of its addresses can be dialled."""

import ctypes
import hashlib
import ipaddress
import os
import socket
from pathlib import Path


def host_identity(proc: Path = Path("/proc")) -> str:
    """The same 32 hexadecimal digits in all processes of one running kernel, PID namespace and user, and in no others.

    That is what shared-memory collectives ask for: a member opens another one's descriptor by process id. Empty where that is
    impossible: on other systems than Linux, with glibc before 2.30 (no sem_clockwait), and without /proc.
    """
    if not hasattr(os, "memfd_create") or not hasattr(ctypes.CDLL(None), "sem_clockwait"):
        return ""
    try:
        boot = (proc / "sys/kernel/random/boot_id").read_text().strip()
        namespace = (proc / "self/ns/pid").stat()
    except OSError:
        return ""
    words = f"{boot} {namespace.st_dev} {namespace.st_ino} {os.geteuid()}"
    return hashlib.sha256(words.encode()).hexdigest()[:32]


def is_wildcard(host: str) -> bool:
    """Whether a host name means all addresses of this host: something to listen on, but nothing to connect to."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        pass
    try:
        return socket.inet_aton(host) == bytes(4)  # also the short forms, such as 0
    except OSError:
        return not host


def local_host(host: str) -> str:
    """Where processes of this host reach something that listens on `host`."""
    if not is_wildcard(host):
        return host
    return "::1" if ":" in host else "127.0.0.1"


def local_address(address: str) -> str:
    """HOST:PORT at which processes of this host reach the server that says it listens on `address`."""
    host, _, port = address.rpartition(":")
    return join_address(local_host(host.strip("[]")), port)


def join_address(host: str, port: int | str) -> str:
    """HOST:PORT, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
