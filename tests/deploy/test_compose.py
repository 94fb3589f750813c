"""docker-compose.yml: what Compose makes of it, and what every service must and must not have."""

import json
import subprocess
import sys
from itertools import combinations

import pytest
import torch

from coordinator.__main__ import build_parser as coordinator_parser
from cp_client.child import POOL_WAIT
from cp_client.default_model import DEFAULT_MODEL
from cp_wire.effective import settle
from cp_wire.flags import cluster_config_from
from cp_wire.sides import sides_from
from model_files import open_model
from rank_server.__main__ import build_parser as rank_parser
from rank_server.collectives.table import backends
from tests.deploy.compose import PROFILES, compose, parsed
from tests.model_files.tiny_checkpoint import write_gguf


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    """All profiles by name."""
    return {profile: parsed(profile, tmp_path_factory.mktemp("home")) for profile in PROFILES}


@pytest.fixture(params=PROFILES)
def services(request, configs):
    """Services of one profile by name."""
    return configs[request.param]["services"]


def split(services):
    """(name of the coordinator, its arguments, arguments of the ranks by name)."""
    (name,) = (name for name, service in services.items() if service["command"][2] == "coordinator")
    ranks = {other: service["command"] for other, service in services.items() if other != name}
    return name, services[name]["command"], ranks


@pytest.mark.parametrize("profile", PROFILES)
def test_compose_accepts_the_profile(profile, tmp_path):
    done = compose("--profile", profile, "config", "--quiet", home=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_without_a_profile_nothing_starts(tmp_path):
    done = compose("config", "--format", "json", home=tmp_path)
    assert json.loads(done.stdout)["services"] == {}


def test_profiles_share_no_service(configs):
    for one, other in combinations(PROFILES, 2):
        assert not configs[one]["services"].keys() & configs[other]["services"].keys()


def test_the_container_is_hardened(services):
    for service in services.values():
        assert service["user"].partition(":")[0] not in ("", "0", "root")
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"] and "cap_add" not in service
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["init"] is True
        assert not service.keys() & {"privileged", "network_mode", "pid", "ipc", "devices", "secrets"}
        (tmpfs,) = service["tmpfs"]
        target, _, options = tmpfs.partition(":")
        assert target == "/tmp" and {"nosuid", "nodev"} <= set(options.split(",")) and "size=" in options


def test_the_model_is_the_only_volume_and_cannot_be_written(services):
    for service in services.values():
        (volume,) = service["volumes"]
        assert (volume["type"], volume["target"], volume["read_only"]) == ("bind", "/models", True)
        # Compose must not create a missing directory: an empty one would hide the mistake.
        assert not volume["bind"].get("create_host_path")


def test_only_the_coordinator_is_published_on_loopback(services):
    coordinator, _, ranks = split(services)
    assert not any("ports" in services[name] for name in ranks)
    (port,) = services[coordinator]["ports"]
    assert (port["host_ip"], port["target"], port["published"]) == ("127.0.0.1", 50051, "50051")


def test_ranks_have_no_way_out(configs):
    for config in configs.values():
        coordinator, _, ranks = split(config["services"])
        assert {name for name, network in config["networks"].items() if network.get("internal")} == {"ranks"}
        assert config["services"][coordinator]["networks"].keys() == {"edge", "ranks"}
        assert all(config["services"][name]["networks"].keys() == {"ranks"} for name in ranks)


def test_ranks_start_when_their_coordinator_listens(services):
    coordinator, _, ranks = split(services)
    assert "--listening" in services[coordinator]["healthcheck"]["test"]
    assert "depends_on" not in services[coordinator]
    for name in ranks:
        assert services[name]["depends_on"] == {coordinator: {"condition": "service_healthy", "required": True}}
        assert services[name]["healthcheck"]["test"][-1] == f"{name}:50052"
        assert services[name]["restart"] == "unless-stopped"


def test_the_ranks_are_those_the_coordinator_expects(services):
    coordinator, command, ranks = split(services)
    args = coordinator_parser().parse_args(command[3:])
    world = sum(side.grid.world_size for side in sides_from(args, lambda asked: asked))
    seats = [rank_parser().parse_args(words[3:]) for words in ranks.values()]
    assert sorted(seat.rank for seat in seats) == list(range(world))
    for name, seat in zip(ranks, seats, strict=True):
        assert (seat.coordinator, seat.model, seat.device) == (f"{coordinator}:{args.port}", args.model, args.device)
        # A rank listens on the name under which others reach it, and finds itself under it.
        assert seat.host == name == services[name]["hostname"]
        assert seat.ranks_on_host == world


@pytest.mark.parametrize(("profile", "expected"), [("cpu", POOL_WAIT), ("pd", POOL_WAIT), ("gpu", None)])
def test_threads_of_a_rank_on_a_cpu_wait_as_those_of_a_local_cluster(configs, profile, expected):
    coordinator, _, ranks = split(configs[profile]["services"])
    assert [configs[profile]["services"][name].get("environment") for name in ranks] == [expected] * len(ranks)
    assert "environment" not in configs[profile]["services"][coordinator]


def test_one_gpu_for_each_rank(configs):
    _, command, ranks = split(configs["gpu"]["services"])
    assert command[command.index("--device") + 1] == "cuda"
    devices = [configs["gpu"]["services"][name]["deploy"]["resources"]["reservations"]["devices"] for name in ranks]
    assert [[device["device_ids"] for device in some] for some in devices] == [[["0"]], [["1"]]]
    assert all("gpu" in device["capabilities"] for some in devices for device in some)
    for name in ranks:
        service = configs["gpu"]["services"][name]
        assert int(service["shm_size"]) >= 1 << 30
        # What is compiled at run time is loaded from there.
        assert "exec" in service["tmpfs"][0].partition(":")[2].split(",")


def test_gpu_commands_ask_for_what_gpus_need(configs, tmp_path):
    """As the coordinator settles it for its ranks, which take any device they are told or named one that agrees."""
    _, command, ranks = split(configs["gpu"]["services"])
    asked = cluster_config_from(coordinator_parser().parse_args(command[3:]))
    config = settle(asked, open_model(write_gguf(tmp_path / "tiny.gguf")).shape)
    assert (config.device, config.collectives, config.max_num_batched_tokens) == ("cuda", "nccl", 8192)
    assert {rank_parser().parse_args(words[3:]).device for words in ranks.values()} == {config.device}
    assert config.collectives in backends("127.0.0.1")


@pytest.mark.cluster
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the rank would start")
def test_j2_a_gpu_rank_without_its_gpu_gives_the_reason(configs):
    _, _, ranks = split(configs["gpu"]["services"])
    for words in ranks.values():
        command = [sys.executable, *words[1:]]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("fatal: device cuda is absent: torch ")


def test_the_bundled_model_is_the_default(services):
    for service in services.values():
        assert f"/models/{DEFAULT_MODEL.file_name}" in service["command"]


def test_model_port_and_builds_can_be_chosen(tmp_path):
    chosen = {"KVLOOM_MODELS": "/srv/somewhere", "KVLOOM_MODEL": "other", "KVLOOM_PORT": "6000", "PIP_INDEX_URL": "mirror"}
    coordinator = parsed("cpu", tmp_path, **chosen)["services"]["coordinator"]
    assert coordinator["volumes"][0]["source"] == "/srv/somewhere"
    assert "/models/other" in coordinator["command"]
    assert (coordinator["ports"][0]["published"], coordinator["ports"][0]["host_ip"]) == ("6000", "127.0.0.1")
    assert coordinator["build"]["args"] == {"PIP_INDEX_URL": "mirror"}
