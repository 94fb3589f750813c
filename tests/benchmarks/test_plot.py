"""The picture that benchmarks draw."""

import xml.etree.ElementTree as ElementTree

import pytest

from benchmarks.plot import line_chart

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(("highest", "top"), [(99.2, "100"), (0.75, "1"), (1.3, "2"), (23, "25"), (0, "1")])
def test_axes_and_lines(tmp_path, highest, top):
    path = tmp_path / "p.svg"
    line_chart(path, "a <title>", "x", "y", {"one": [(1, 0), (4, highest)], "two & more": [(2, 0)]})
    root = ElementTree.parse(path).getroot()
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert {"a <title>", "x", "y", "one", "two & more", "0", top, "2", "4"} <= set(texts)
    one, two = (element.get("points").split() for element in root.iter(f"{SVG}polyline"))
    (x0, y0), (x1, y1) = (map(float, point.split(",")) for point in one)
    (x2, y2) = map(float, two[0].split(","))
    assert x0 < x2 == (x0 + x1) / 2 < x1
    assert y2 == y0 and y1 <= y0


def test_one_point_is_a_picture_too(tmp_path):
    line_chart(tmp_path / "p.svg", "t", "x", "y", {"one": [(3, 1)]})
    assert (tmp_path / "p.svg").stat().st_size > 0
