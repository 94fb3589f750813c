"""The own commands and health checks of the profiles for CPUs as processes: start order, tokens, restarts."""

import random
import signal

import pytest

from cp_client import Client
from tests.deploy.compose import local_services, parsed
from tests.tiny_models import build_tiny_llama, greedy_reference

pytestmark = pytest.mark.cluster


def test_cpu_services_start_serve_and_come_back(tmp_path):
    path = build_tiny_llama(tmp_path / "models" / "tiny", heads=8, kv_heads=2)
    variables = {"KVLOOM_MODELS": str(path.parent), "KVLOOM_MODEL": path.name, "KVLOOM_KV_CACHE_MEMORY": "1MiB"}
    config = parsed("cpu", tmp_path, **variables)
    rng = random.Random(3)
    prompts = [[rng.randrange(200) for _ in range(length)] for length in (1, 16, 17, 70)]
    serving = ["python", "-m", "cp_wire.healthcheck", "coordinator:50051"]

    def right_tokens(client: Client) -> None:
        for prompt in prompts:
            events = client.generate(token_ids=prompt, max_tokens=6, temperature=0.0, ignore_eos=True)
            assert [token for event in events for token in event.token_ids] == greedy_reference(path, prompt, 6)

    with local_services(config, tmp_path) as services, Client(services.target("coordinator")) as client:
        services.until_passes("coordinator", serving)
        for rank in ("rank-0", "rank-1"):
            services.until_passes(rank, config["services"][rank]["healthcheck"]["test"][1:])
        right_tokens(client)

        # A rank that was killed is started again with the same command, name and port.
        assert services.send("rank-1", signal.SIGKILL) == -signal.SIGKILL
        services.start("rank-1")
        services.until_passes("rank-1", config["services"]["rank-1"]["healthcheck"]["test"][1:])
        services.until_passes("coordinator", serving)
        right_tokens(client)

        # A rank without a coordinator ends as if all were well: only an unconditional restart brings it back.
        assert services.send("coordinator", signal.SIGTERM) == 0
        assert [services.exit_status(rank) for rank in ("rank-0", "rank-1")] == [0, 0]
        assert {service["restart"] for service in config["services"].values()} == {"unless-stopped"}
        services.up()
        services.until_passes("coordinator", serving)
        right_tokens(client)


def test_pd_services_start_and_move_what_they_compute(tmp_path):
    path = build_tiny_llama(tmp_path / "models" / "tiny", heads=8, kv_heads=2)
    variables = {"KVLOOM_MODELS": str(path.parent), "KVLOOM_MODEL": path.name, "KVLOOM_KV_CACHE_MEMORY": "1MiB"}
    config = parsed("pd", tmp_path, **variables)
    prompt = [random.Random(4).randrange(200) for _ in range(70)]
    with local_services(config, tmp_path) as services, Client(services.target("coordinator-pd")) as client:
        services.until_passes("coordinator-pd", ["python", "-m", "cp_wire.healthcheck", "coordinator-pd:50051"])
        got = client.complete(token_ids=prompt, max_tokens=6, temperature=0.0, ignore_eos=True)
        assert list(got.token_ids) == greedy_reference(path, prompt, 6)
        status = client.status()
        assert [rank.role for rank in status.ranks] == ["prefill", "prefill", "decode"]
        assert status.transfers.requests == 1 and not status.transfers.recomputed
