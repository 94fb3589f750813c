"""What tells hosts apart, and what does not."""

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cp_wire.host import host_identity, is_wildcard, join_address, local_address, local_host


def fake_proc(root: Path, boot_id: str = "b-1", namespace: str = "n-1") -> Path:
    proc = root / boot_id / namespace
    for name, text in (("sys/kernel/random/boot_id", f"{boot_id}\n"), ("self/ns/pid", namespace)):
        (proc / name).parent.mkdir(parents=True)
        (proc / name).write_text(text)
    return proc


def test_processes_of_one_host_agree():
    there = subprocess.run(
        [
            sys.executable,
            "-c",
            "from cp_wire.host import host_identity; print(host_identity())",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert there.stdout.strip() == host_identity()
    assert re.fullmatch("[0-9a-f]{32}", host_identity())


def test_another_boot_namespace_or_user_is_another_host(tmp_path, monkeypatch):
    here = fake_proc(tmp_path)
    identities = {host_identity(here), host_identity(fake_proc(tmp_path, boot_id="b-2"))}
    identities.add(host_identity(fake_proc(tmp_path, namespace="n-2")))
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    identities.add(host_identity(here))
    assert len(identities) == 4


@pytest.mark.parametrize("missing", ["sys/kernel/random/boot_id", "self/ns/pid"])
def test_no_identity_without_proc(tmp_path, missing):
    proc = fake_proc(tmp_path)
    (proc / missing).unlink()
    assert host_identity(proc) == ""


def test_no_identity_on_a_system_without_the_calls(monkeypatch):
    with monkeypatch.context() as patch:
        patch.delattr(os, "memfd_create")
        assert host_identity() == ""
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert host_identity() == ""


@pytest.mark.parametrize("host", ["0.0.0.0", "0", "::", "0:0::0", ""])
def test_a5_wildcards_are_told_from_addresses(host):
    assert is_wildcard(host)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "rank-0", "10.0.0.0"])
def test_a5_addresses_and_names_are_no_wildcards(host):
    assert not is_wildcard(host)
    assert local_host(host) == host


@pytest.mark.parametrize(
    ("listens", "dialled"),
    [
        ("0.0.0.0:80", "127.0.0.1:80"),
        ("[::]:80", "[::1]:80"),
        ("[::1]:80", "[::1]:80"),
        ("10.1.2.3:80", "10.1.2.3:80"),
        ("rank-0:80", "rank-0:80"),
    ],
)
def test_a5_a_server_on_all_addresses_is_reached_on_the_loopback(listens, dialled):
    assert local_address(listens) == dialled


def test_ipv6_gets_brackets():
    assert join_address("::1", 5) == "[::1]:5"
    assert join_address("127.0.0.1", 5) == "127.0.0.1:5"
