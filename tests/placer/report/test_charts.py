from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from placer.report.charts import Bar, Chart, Part, bars, columns, drawing, legend
from placer.utils.units import ms_text

SVG = "{http://www.w3.org/2000/svg}"


def parsed(shapes: str, height: int) -> ElementTree.Element:
    return ElementTree.fromstring(drawing("a title", shapes, height))


def sizes(root: ElementTree.Element, name: str) -> dict[str, float]:
    """The height or width of each rectangle, by what its title says."""
    return {
        rect.findtext(f"{SVG}title") or "": float(rect.attrib[name])
        for rect in root.iter(f"{SVG}rect")
    }


def test_columns_are_as_high_as_their_values() -> None:
    chart = Chart(
        "t", ["a", "b"], [Part("forward", 0, [1.0, 2.0]), Part("backward", 1, [3.0, 0.0])], ms_text
    )
    heights = sizes(parsed(*columns(chart)), "height")
    # nothing for nothing
    assert set(heights) == {"a: forward 1.00 ms", "b: forward 2.00 ms", "a: backward 3.00 ms"}
    assert heights["b: forward 2.00 ms"] == pytest.approx(
        2 * heights["a: forward 1.00 ms"], rel=0.01
    )
    assert heights["a: backward 3.00 ms"] == pytest.approx(
        3 * heights["a: forward 1.00 ms"], rel=0.01
    )


def test_stacked_parts_stand_on_each_other() -> None:
    chart = Chart("t", ["a"], [Part("x", 0, [1.0]), Part("y", 1, [1.0])], ms_text)
    lower, upper = parsed(*columns(chart)).iter(f"{SVG}rect")
    assert float(upper.attrib["y"]) + float(upper.attrib["height"]) == pytest.approx(
        float(lower.attrib["y"]), abs=0.2
    )


def test_too_many_columns_are_added_up_with_their_neighbours() -> None:
    count = 1000
    chart = Chart(
        "t", [f"l{index}" for index in range(count)], [Part("x", 0, [1.0] * count)], ms_text
    )
    found = sizes(parsed(*columns(chart)), "height")
    assert len(found) < 200
    assert "l0 … l6: x 7.00 ms" in found
    shown = [float(match[1]) for name in found if (match := re.search(r"([0-9.]+) ms$", name))]
    assert sum(shown) == count


def test_bars_share_one_scale_and_mark_their_limit() -> None:
    rows = [
        Bar("cuda:0", [("compute", 0, 2.0), ("send", 1, 2.0)], "4 ms", 8.0),
        Bar("cuda:1", [("compute", 0, 1.0)], ""),
    ]
    root = parsed(*bars(rows, ms_text))
    widths = sizes(root, "width")
    assert widths["cuda:0: compute 2.00 ms"] == widths["cuda:0: send 2.00 ms"]
    assert widths["cuda:0: compute 2.00 ms"] == pytest.approx(
        2 * widths["cuda:1: compute 1.00 ms"], rel=0.01
    )
    (limit,) = (line for line in root.iter(f"{SVG}line") if line.attrib.get("class") == "limit")
    first = next(root.iter(f"{SVG}rect"))
    assert float(limit.attrib["x1"]) - float(first.attrib["x"]) == pytest.approx(
        4 * widths["cuda:0: send 2.00 ms"], abs=0.2
    )


@pytest.mark.parametrize("values", [[], [0.0], [0.0, 0.0]])
def test_a_chart_of_nothing_is_drawn(values: list[float]) -> None:
    chart = Chart(
        "t", [f"l{index}" for index in range(len(values))], [Part("x", 0, values)], ms_text
    )
    assert sizes(parsed(*columns(chart)), "height") == {}
    assert sizes(parsed(*bars([], ms_text)), "width") == {}


def test_names_with_markup_stay_text() -> None:
    name = '<script>alert("&")</script>'
    root = parsed(*columns(Chart("t", [name], [Part(name, 0, [1.0])], ms_text)))
    assert [element.tag for element in root.iter() if "script" in element.tag] == []
    assert f"{name}: {name} 1.00 ms" in sizes(root, "height")


def test_a_legend_names_each_colour() -> None:
    root = parsed(*legend([("forward", 0), ("backward", 1)]))
    assert [text.text for text in root.iter(f"{SVG}text")] == ["forward", "backward"]
    assert [rect.attrib["class"] for rect in root.iter(f"{SVG}rect")] == ["c0", "c1"]
