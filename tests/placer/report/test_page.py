from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from placer.report.comparing import compare
from placer.report.comparison_page import comparison_report
from placer.report.page import html_report
from placer.report.pictures import layer_charts, picture, placed_chart
from placer.schema import Infeasibility, Placement, PlacementRequest, Profile

Make = Callable[..., Profile]
Place = Callable[..., Placement]


class _Reader(HTMLParser):
    """Which elements there are, what they refer to, and whether each is closed."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.references: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(document)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [
            value or "" for name, value in attrs if name in ("src", "href", "action", "data")
        ]
        if tag not in ("meta", "br"):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture
def placed(make_placement: Place) -> Placement:
    return make_placement({"a": "cuda:0", "b": "cuda:1"}, {"cuda:0": 4.0, "cuda:1": 6.0})


def test_a_profile_shows_its_times_memory_layers_and_devices(make_profile: Make) -> None:
    page = _Reader(html_report(make_profile({"a": 1.25, "b": 2.5})))
    for shown in (
        "Profile of Net",
        "Time by layer on H200",
        "Memory by layer",
        "1.25 ms",
        "5.00 ms",
        "4.0 KiB",
        "cuda:1",
    ):
        assert shown in page.text, shown


def test_a_placement_shows_its_devices_and_where_layers_are(placed: Placement) -> None:
    page = _Reader(html_report(placed))
    for shown in (
        "Placement of Net",
        "optimal: proven",
        "6.00 ms ◀ busiest",
        "5.0 KiB of 16.0 KiB",
        "cuda:0",
    ):
        assert shown in page.text, shown
    assert "by device" not in page.text


def test_times_of_another_micro_batch_size_are_left_out_and_the_report_says_so(
    make_profile: Make, placed: Placement
) -> None:
    # A placement chosen among several sizes was drawn with the times of another one.
    text = _Reader(html_report(placed, make_profile({"a": 1.0, "b": 2.0}, batch_size=4))).text
    assert (
        "the profile that was given has micro-batches of 4, "
        "and the placement has micro-batches of 1" in text
    )
    assert "by device" not in text


def test_with_its_profile_a_placement_shows_its_layers_by_device(
    make_profile: Make, placed: Placement
) -> None:
    profile = make_profile({"a": 1.0, "b": 2.0})
    assert "Time by layer, by device" in _Reader(html_report(placed, profile)).text
    parts = {part.name: list(part.values) for part in placed_chart(placed, profile).parts}
    assert parts == {"cuda:0": [3.0, 0.0], "cuda:1": [0.0, 6.0]}


def test_a_request_shows_its_profile(make_profile: Make) -> None:
    request = PlacementRequest(profile=make_profile({"a": 1.0}))
    assert html_report(request) == html_report(request.profile)


def test_a_cluster_shows_its_links(make_profile: Make) -> None:
    cluster = make_profile({"a": 1.0}).cluster
    assert cluster is not None
    assert "100.00 GB/s" in _Reader(html_report(cluster)).text


def test_a_request_that_is_infeasible_says_why() -> None:
    answer = Placement(
        status="infeasible",
        objective="latency",
        infeasible=Infeasibility(reason="too large by far"),
    )
    assert "too large by far" in _Reader(html_report(answer)).text


def test_nothing_is_fetched_and_nothing_runs(make_profile: Make, placed: Placement) -> None:
    for document in (html_report(make_profile({"a": 1.0})), html_report(placed)):
        page = _Reader(document)
        assert page.references == []
        assert not {"script", "link", "img", "iframe", "object", "form"} & set(page.tags)
        assert re.findall(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", document) == []
        assert "default-src 'none'" in document


def test_names_of_a_model_cannot_put_anything_into_the_page(make_profile: Make) -> None:
    evil = '"><script>alert(1)</script><img src=x onerror=alert(1)>'
    page = _Reader(html_report(make_profile({evil: 1.0}, model=evil)))
    assert not {"script", "img"} & set(page.tags)
    assert evil in page.text


def test_a_model_of_ten_thousand_layers_makes_a_page_that_can_be_sent(make_profile: Make) -> None:
    document = html_report(make_profile({f"layer{index}": 1.0 for index in range(10_000)}))
    assert len(document) < 3_000_000
    assert "and 5000 more" in _Reader(document).text


@pytest.mark.parametrize("training", [True, False])
def test_a_picture_is_a_file_of_its_own(make_profile: Make, training: bool) -> None:
    root = ElementTree.fromstring(picture(make_profile({"a": 1.0, "b": 2.0}, training=training)))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    words = {text.text for text in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"Time by layer on H200", "forward", "Memory by layer"} <= words
    assert ("backward" in words) is training


def test_a_placement_has_a_picture_too(placed: Placement) -> None:
    words = {
        text.text
        for text in ElementTree.fromstring(picture(placed)).iter("{http://www.w3.org/2000/svg}text")
    }
    assert {"Time per micro-batch", "Memory", "compute", "send", "cuda:0"} <= words
    assert "receive" not in words  # nothing is received


def test_the_charts_add_up_to_the_profile(make_profile: Make) -> None:
    time, memory = layer_charts(make_profile({"a": 1.0, "b": 2.0}))
    assert sum(sum(part.values) for part in time.parts) == 3 * (1 + 2)
    assert sum(sum(part.values) for part in memory.parts) == 2 * (4 + 1 + 3) * 1024


def test_a_comparison_shows_what_changed_most_first(make_profile: Make) -> None:
    first, second = (
        make_profile({"a": 1.0, "b": 1.0, "c": 1.0}),
        make_profile({"a": 1.0, "b": 1.5, "c": 3.0}),
    )
    text = _Reader(comparison_report(compare(first, second))).text
    shown = text[text.index("Time on H200") : text.index("Memory, largest changes")]
    assert shown.index("c: first 3.00 ms") < shown.index("b: first 3.00 ms")
    assert "a: first" not in shown
    assert "3.00 of the first" in shown
    assert "nothing changed" in text  # of memory


def test_a_comparison_of_placements_fetches_nothing(make_placement: Place) -> None:
    both = [make_placement({"<a>": "cuda:0"}, {"cuda:0": load}) for load in (4.0, 3.0)]
    page = _Reader(comparison_report(compare(*both)))
    assert page.references == []
    assert "Two placements" in page.text and "0.75 of the first" in page.text
