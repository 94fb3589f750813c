"""Generates the checked-in stubs: `python -m cp_wire.generate [OUTPUT_ROOT]`.

protoc maps the virtual directory `cp_wire/pb` onto `protos/`, so the generated imports need no rewriting. The pinned
generator is older than every supported runtime: newer runtimes load its output, older ones would not load newer output.
"""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "cp_wire/pb"


def generate(output_root: Path) -> list[Path]:
    """Writes `*_pb2.py`, `*_pb2.pyi` and `*_pb2_grpc.py` below `output_root`/cp_wire/pb; returns the files."""
    names = sorted(path.name for path in (ROOT / "protos").glob("*.proto"))
    (output_root / PACKAGE).mkdir(parents=True, exist_ok=True)
    plugin = shutil.which("protoc-gen-mypy", path=str(Path(sys.executable).parent))
    if plugin is None:
        raise FileNotFoundError("protoc-gen-mypy is not installed beside this Python; install the `dev` extra")
    subprocess.run(
        [
            sys.executable, "-m", "grpc_tools.protoc",
            f"-I{PACKAGE}={ROOT / 'protos'}",
            f"--plugin=protoc-gen-mypy={plugin}",
            f"--python_out={output_root}",
            f"--grpc_python_out={output_root}",
            f"--mypy_out=quiet:{output_root}",
            *(f"{PACKAGE}/{name}" for name in names),
        ],
        check=True,
        cwd=ROOT,
    )  # fmt: skip
    return sorted((output_root / PACKAGE).glob("*_pb2*.py*"))


if __name__ == "__main__":
    for path in generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT):
        print(path)
