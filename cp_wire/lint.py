"""Lints the proto sources with buf: `python -m cp_wire.lint`.

buf knows no virtual paths, so protoc resolves the imports and buf judges the compiled descriptors.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from cp_wire.generate import PACKAGE, ROOT

TIMEOUT_S = 60.0


def lint(protos: Path = ROOT / "protos") -> int:
    """Exit status of buf, or of protoc if a source does not compile; complaints go to stdout and stderr."""
    with tempfile.TemporaryDirectory() as scratch:
        image = Path(scratch) / "protos.binpb"
        names = sorted(path.name for path in protos.glob("*.proto"))
        compile_command = [
            *(sys.executable, "-m", "grpc_tools.protoc", f"-I{PACKAGE}={protos}"),
            *(f"--descriptor_set_out={image}", "--include_imports", "--include_source_info"),
            *(f"{PACKAGE}/{name}" for name in names),
        ]
        buf_command = [str(Path(sys.executable).parent / "buf"), "lint", str(image), "--config", str(ROOT / "buf.yaml")]
        for command in (compile_command, buf_command):
            status = subprocess.run(command, timeout=TIMEOUT_S).returncode
            if status != 0:
                return status
    return 0


if __name__ == "__main__":
    sys.exit(lint())
