"""Both clients against a scripted server."""

import asyncio
import gc
import threading

import grpc
import pytest

from cp_client import AsyncClient, Client, errors
from tests.cp_client.fake_coordinator import DEADLINE_S, Cable, accepted, running, tokens


async def collect(client, **options):
    return [event async for event in client.generate("hi", **options)]


def test_sync_events_and_completion(fake, target):
    with Client(target) as client:
        events = list(client.generate("hi", max_tokens=3))
        answer = client.complete(token_ids=[1, 2])
    assert "".join(event.text for event in events) == answer.text == "Hello"
    assert events[-1].finish_reason == answer.finish_reason == "stop"
    assert events[-1].usage.prompt_tokens == 3
    assert events[-1].route.ranks == (0, 1)
    assert answer.seed == 7
    assert answer.timing.ttft_ms > 0
    assert [request.WhichOneof("prompt") for request in fake.requests] == ["text", "tokens"]


async def test_async_events_and_completion(fake, target):
    async with AsyncClient(target) as client:
        events = await collect(client, max_tokens=3)
        answer = await client.complete(messages=[{"role": "user", "content": "hi"}])
    assert "".join(event.text for event in events) == answer.text == "Hello"
    assert fake.requests[0].max_tokens == 3
    assert fake.requests[1].WhichOneof("prompt") == "chat"


FAILURES = [
    errors.InvalidRequest("top_p", 2, "must be in (0, 1]"),
    errors.Exhausted("the queue is full", retry_after_s=0.5),
    errors.Unavailable("rank 1 was lost"),
    errors.Internal("oops"),
]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
async def test_l3_errors_are_typed_in_both_clients(fake, target, failure):
    fake.script = [accepted(), tokens("a", 1), failure]
    with Client(target) as client:
        stream = client.generate("hi")
        assert next(stream).text == "a"
        with pytest.raises(type(failure)) as from_sync:
            next(stream)
    async with AsyncClient(target) as client:
        with pytest.raises(type(failure)) as from_async:
            await collect(client)
    for caught in (from_sync, from_async):
        assert vars(caught.value) == {**vars(failure), "is_told": True}
        assert isinstance(caught.value.code, grpc.StatusCode)


async def test_l3_an_early_end_is_an_error(fake, target):
    fake.script = [accepted(), tokens("a", 1)]
    with Client(target) as client, pytest.raises(errors.Internal, match="without a terminal event"):
        client.complete("hi")
    async with AsyncClient(target) as client:
        with pytest.raises(errors.Internal, match="without a terminal event"):
            await client.complete("hi")


@pytest.fixture
def endless(fake):
    gate = threading.Event()
    fake.script = [accepted("r9"), tokens("a", 1), gate]
    yield
    gate.set()


@pytest.mark.parametrize("how", ["close", "with", "drop"])
def test_leaving_the_iterator_cancels_the_request(fake, target, endless, how):
    with Client(target) as client:
        if how == "with":
            with client.generate("hi") as stream:
                next(stream)
        else:
            stream = client.generate("hi")
            for _ in stream:
                break
            assert stream.request_id == "r9"
            if how == "close":
                stream.close()
                assert list(stream) == []
            del stream
            gc.collect()
        assert fake.cancelled.wait(DEADLINE_S)


async def test_leaving_the_async_iterator_cancels_the_request(fake, target, endless):
    async with AsyncClient(target) as client:
        stream = client.generate("hi")
        await anext(stream)
        await stream.aclose()
        assert [event async for event in stream] == []
        assert await asyncio.to_thread(fake.cancelled.wait, DEADLINE_S)


async def test_cancelling_the_task_cancels_the_request(fake, target, endless):
    async with AsyncClient(target) as client:
        stream = client.generate("hi")
        await anext(stream)
        task = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(fake.cancelled.wait, DEADLINE_S)


async def test_k3_closing_the_client_ends_a_waiting_reader(fake, target, endless):
    client = AsyncClient(target)
    stream = client.generate("hi")
    await anext(stream)
    task = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    await client.close()
    with pytest.raises(errors.Cancelled):
        await asyncio.wait_for(task, DEADLINE_S)


async def test_k3_the_deadline_of_a_request(target, endless):
    with Client(target) as client, pytest.raises(errors.DeadlineExceeded) as caught:
        client.complete("hi", timeout=0.3)
    assert caught.value.retryable
    assert caught.value.message == f"no whole answer from {target} within 0.3 s"
    async with AsyncClient(target) as client:
        with pytest.raises(errors.DeadlineExceeded) as caught:
            await client.complete("hi", timeout=0.3)
    assert caught.value.message == f"no whole answer from {target} within 0.3 s"


NOBODY = "no kvloom coordinator answers at 127.0.0.1:1: is it running? `kvloom up` starts one"


async def test_nobody_listens():
    with Client("127.0.0.1:1") as client:
        for ask in (client.status, client.config, client.drain, lambda: client.abort("r1"), lambda: client.complete("hi")):
            with pytest.raises(errors.Unavailable) as caught:
                ask()
            assert caught.value.message == NOBODY and caught.value.retryable
    async with AsyncClient("127.0.0.1:1") as client:
        for ask in (client.status, client.config, client.drain, lambda: client.abort("r1"), lambda: client.complete("hi")):
            with pytest.raises(errors.Unavailable) as caught:
                await ask()
            assert caught.value.message == NOBODY and caught.value.retryable


async def test_a_broken_stream_names_the_coordinator(fake, target, endless):
    cable = Cable(target)
    with Client(cable.target) as client:
        stream = client.generate("hi")
        assert next(stream).text == "a"
        cable.cut()
        with pytest.raises(errors.Unavailable) as caught:
            next(stream)
        assert caught.value.message == f"the coordinator at {cable.target} went away in the middle of the answer"
    cable = Cable(target)
    async with AsyncClient(cable.target) as client:
        stream = client.generate("hi")
        assert (await anext(stream)).text == "a"
        await asyncio.to_thread(cable.cut)
        with pytest.raises(errors.Unavailable) as caught:
            await anext(stream)
        assert caught.value.message == f"the coordinator at {cable.target} went away in the middle of the answer"
        assert caught.value.retryable


async def test_what_answers_is_no_coordinator():
    with running(None) as address:
        with Client(address) as client, pytest.raises(errors.Internal) as caught:
            client.complete("hi")
        assert caught.value.message.startswith(f"what answers at {address} is no kvloom coordinator")
        async with AsyncClient(address) as client:
            with pytest.raises(errors.Internal, match="is no kvloom coordinator"):
                await client.status()


async def test_abort_status_and_drain(fake, target):
    fake.status.running = 4
    with Client(target) as client:
        client.abort("r1")
        assert client.status().running == 4
        assert client.drain(1.5) == 2
        with pytest.raises(errors.Unknown, match="nobody"):
            client.abort("nobody")
    async with AsyncClient(target) as client:
        await client.abort("r2")
        assert (await client.status()).running == 4
        assert await client.drain(2) == 2
        with pytest.raises(errors.Unknown, match="nobody"):
            await client.abort("nobody")
    assert fake.aborted == ["r1", "r2"]
    assert fake.drains == [1500, 2000]


def test_k5_one_sync_client_in_eight_threads(target):
    answers = []
    with Client(target) as client:
        threads = [threading.Thread(target=lambda: answers.append(client.complete("hi").text)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
    assert answers == ["Hello"] * 8


def test_k5_async_clients_in_two_threads_with_their_own_loops(target):
    answers = []

    async def ask():
        async with AsyncClient(target) as client:
            answers.append((await client.complete("hi")).text)

    threads = [threading.Thread(target=lambda: asyncio.run(ask())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert answers == ["Hello"] * 2


async def test_j5_both_clients_read_the_effective_configuration(fake, target):
    async with AsyncClient(target) as client:
        with pytest.raises(errors.Unknown, match="no configuration"):
            await client.config()
        fake.config.tp, fake.config.interleave = 2, 4
        assert await client.config() == fake.config
    with Client(target) as client:
        assert (client.config().tp, client.config().interleave) == (2, 4)
        fake.config.tp = 0
        with pytest.raises(errors.Unknown, match="no configuration"):
            client.config()
