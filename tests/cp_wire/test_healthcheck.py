"""The health check of containers: exit status, deadline, what it says."""

import asyncio
import socket
import time

import pytest

from cp_wire.healthcheck import main
from tests.cp_wire.services import Echo, serving


async def check(*arguments: str) -> int:
    return await asyncio.to_thread(main, arguments)


async def test_l1_serving_is_healthy_and_not_serving_is_not(capsys):
    async with serving(Echo()) as (server, address):
        assert await check(address) == 1
        assert capsys.readouterr().err == f"{address}: NOT_SERVING\n"
        server.set_serving(True)
        assert await check(address) == 0
        assert capsys.readouterr().err == ""
        server.set_serving(False)
        assert await check(address) == 1


async def test_listening_is_content_with_a_process_that_does_not_serve_yet():
    async with serving(Echo()) as (_, address):
        assert await check("--listening", address) == 0


@pytest.mark.parametrize("flags", [(), ("--listening",)])
async def test_nobody_at_the_port(flags, capsys):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        assert await check(*flags, address) == 1
    assert capsys.readouterr().err.startswith(f"{address}: ")


async def test_l1_a_process_that_accepts_and_never_answers_costs_the_deadline_only():
    with socket.create_server(("127.0.0.1", 0)) as mute:
        start = time.monotonic()
        assert await check("--listening", "--timeout", "1", f"127.0.0.1:{mute.getsockname()[1]}") == 1
        assert time.monotonic() - start < 5


@pytest.mark.parametrize("flags", [(), ("--timeout", "0", "127.0.0.1:1"), ("--timeout", "nan", "127.0.0.1:1")])
def test_bad_usage(flags):
    with pytest.raises(SystemExit) as exit_:
        main(flags)
    assert exit_.value.code == 2
