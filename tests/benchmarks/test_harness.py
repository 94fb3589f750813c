"""What all benchmarks do with a picture that cannot be drawn, and without the packages that they compare ranks with."""

import os
import sys

import pytest

from benchmarks import chooser, compare, layout, plot, seeded
from benchmarks.harness import parser, report, run_benchmark


@pytest.fixture
def flags():
    return parser("any", "measures something", plot="it")


def refusal(flags, capsys, path) -> str:
    with pytest.raises(SystemExit) as stopped:
        flags.parse_args(["--plot", str(path)])
    assert stopped.value.code == 2
    (said,) = capsys.readouterr().err.splitlines()
    return said


def test_a_picture_that_has_no_place_is_refused(flags, capsys, tmp_path):
    absent, file = tmp_path / "absent", tmp_path / "file"
    file.touch()
    for path in (absent / "p.svg", file / "p.svg"):
        assert f"'{path}' cannot be made: '{path.parent}' is not a directory" in refusal(flags, capsys, path)
    assert f"'{tmp_path}' is a directory" in refusal(flags, capsys, tmp_path)


def test_a_picture_that_may_not_be_written_is_refused(flags, capsys, tmp_path, monkeypatch):
    """Root may write anywhere, so that the answer of the system is played."""
    file, new = tmp_path / "file", tmp_path / "p.svg"
    file.touch()
    assert [flags.parse_args(["--plot", str(path)]).plot for path in (file, new)] == [file, new]
    asked = []
    monkeypatch.setattr(os, "access", lambda path, mode: asked.append((path, mode)))
    assert f"'{file}' cannot be written" in refusal(flags, capsys, file)
    assert "not a directory that can be written to" in refusal(flags, capsys, new)
    assert asked == [(file, os.W_OK), (tmp_path, os.W_OK | os.X_OK)] and not new.exists()


def test_a_result_is_told_before_it_is_drawn(flags, capsys, tmp_path):
    told = []
    for words in (["--plot", str(tmp_path / "p.svg")], []):
        report(flags.parse_args(words), {}, ["figures"], lambda path: told.append((path, capsys.readouterr().out)))
    assert told == [(tmp_path / "p.svg", "figures\n")] and capsys.readouterr().out == "figures\n"


def test_a_benchmark_that_cannot_draw_has_told_its_result(monkeypatch, tmp_path, capsys):
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(layout, plot.line_chart.__name__, full)
    with pytest.raises(OSError, match="No space left"):
        layout.main(["--seeds", "1", "--plot", str(tmp_path / "p.svg")])
    assert "N 2 interleave" in capsys.readouterr().out


def test_a_picture_of_no_context_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        chooser.main(["--grid", "8x0", "--plot", str(tmp_path / "p.svg")])
    assert stopped.value.code == 2 and "--grid has none" in capsys.readouterr().err


def test_a_package_to_compare_with_that_is_absent_is_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert run_benchmark(lambda: bool(seeded.write(tmp_path, "llama"))) == 1
    assert capsys.readouterr().err == "fatal: transformers is not installed: pip install -e '.[dev]' brings it\n"


def test_a_gguf_file_is_compared_only_with_accelerate(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    assert run_benchmark(lambda: bool(compare.of_transformers(tmp_path / "m.gguf"))) == 1
    assert capsys.readouterr().err == "fatal: accelerate is not installed: pip install -e '.[dev]' brings it\n"


def test_any_other_module_that_is_absent_is_a_fault():
    def main() -> int:
        raise ModuleNotFoundError("No module named 'transformers.other'", name="transformers.other")

    with pytest.raises(ModuleNotFoundError, match="other"):
        run_benchmark(main)
