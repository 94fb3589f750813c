"""The Dockerfile: its targets, what it copies, what is left in the images."""

import json
import tomllib

import pytest

from tests.deploy.compose import PROFILES, parsed
from tests.deploy.dockerfile import ROOT, copied_from_the_context, in_the_context, stages

TARGETS = ("control", "rank-cpu", "rank-gpu")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_targets():
    assert set(TARGETS) <= stages().keys()


def test_every_stage_builds_on_an_earlier_one_or_an_ordinary_image():
    seen = set()
    for stage in stages().values():
        assert stage.parent in seen or stage.parent == "python:3.11-slim"
        sources = {rest.split()[0].removeprefix("--from=") for rest in stage.all("COPY") if rest.startswith("--from=")}
        assert sources <= seen
        seen.add(stage.name)


def test_copied_paths_exist_and_reach_the_builder():
    paths = [path for stage in stages().values() for path in copied_from_the_context(stage)]
    assert paths
    for path in paths:
        assert (ROOT / path).exists(), path
        assert in_the_context(path), path
    assert not in_the_context(".git") and not in_the_context("tests")


def test_the_wheel_gets_every_package():
    packages = {package.partition(".")[0] for package in PROJECT["tool"]["setuptools"]["packages"]}
    assert packages | {"pyproject.toml", PROJECT["project"]["readme"]} == set(copied_from_the_context(stages()["wheel"]))


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_holds_the_environment_and_runs_as_somebody_else_than_root(target):
    stage = stages()[target]
    assert stage.parent == "base"
    assert copied_from_the_context(stage) == []
    assert stage.all("COPY") == [f"--from={target}-environment /opt/kvloom /opt/kvloom"]
    assert stage.all("USER") == ["10001:10001"]
    assert [word for word, _ in stage.steps].index("USER") > max(
        (i for i, (word, _) in enumerate(stage.steps) if word == "RUN"), default=-1
    )


@pytest.mark.parametrize("target", TARGETS)
def test_only_the_gpu_image_installs_anything_more(target):
    runs = stages()[target].all("RUN")
    if target == "rank-gpu":
        (run,) = runs
        assert "--no-install-recommends gcc libc6-dev &&" in run and run.endswith("rm -rf /var/lib/apt/lists/*")
    else:
        assert runs == []


def test_only_ranks_get_torch():
    dependencies = {target: stages()[f"{target}-dependencies"].all("RUN")[0] for target in TARGETS}
    asked = {target: run.partition("requirements.py")[2].partition(">")[0].split() for target, run in dependencies.items()}
    assert asked == {"control": [], "rank-cpu": ["rank"], "rank-gpu": ["rank", "gpu"]}


@pytest.mark.parametrize("profile", PROFILES)
def test_image_and_compose_agree_on_target_user_port_and_health(profile, tmp_path):
    for name, service in parsed(profile, tmp_path)["services"].items():
        stage = stages()[service["build"]["target"]]
        assert stage.all("USER") == [service["user"]]
        port = service["command"][service["command"].index("--port") + 1]
        assert stage.all("EXPOSE") == [port]
        (health,) = stage.all("HEALTHCHECK")
        check = health.partition("CMD ")[2]
        words = (
            json.loads(check) if check.startswith("[") else check.replace('"$(hostname):', f'"{name}:').replace('"', "").split()
        )
        assert ["CMD", *words] == service["healthcheck"]["test"]
        assert service["command"][:3] == json.loads(stage.all("CMD")[0])[:3]
