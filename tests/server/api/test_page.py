"""The page, in a real Chromium where there is one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest
from browser import CHROMIUM, DRIVER, browsing

import placer_server
from placer.report.page import html_report
from placer.schema import Placement, PlacementRequest
from placer_server.app import background
from placer_server.openapi import examples
from placer_server.settings import Settings

needs_chromium = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="chromium and chromedriver are not installed")

SOURCES = Path(placer_server.__path__[0]) / "page"


def test_the_page_and_its_files_are_served_with_their_types_and_tags(serve):
    client = serve()
    page = client.get("/")
    assert page.headers["Content-Type"].startswith("text/html")
    for path in re.findall(r'(?:href|src)="(page/[^"]+)"', page.text):
        reply = client.get(f"/{path}")
        assert reply.status_code == 200
        assert client.get(f"/{path}", headers={"If-None-Match": reply.headers["ETag"]}).status_code == 304
    assert client.get("/page/../settings.py").status_code == 404
    assert client.get("/page/nothing.js").status_code == 404


def test_the_page_asks_no_other_host_and_needs_no_inline_code():
    for file in SOURCES.iterdir():
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//[a-z]+\.|innerHTML\s*=|\beval\(|style=\"", text), file.name
    assert "<script>" not in (SOURCES / "index.html").read_text()


def test_every_input_of_the_page_has_a_label():
    text = (SOURCES / "index.html").read_text()
    fields = re.findall(r'<(?:input|select)[^>]*\bid="([^"]+)"', text)
    assert len(fields) > 8
    assert set(fields) <= set(re.findall(r'<label for="([^"]+)"', text))


@pytest.fixture(scope="module")
def browser():
    with browsing() as browser:
        yield browser


@pytest.fixture
def page(browser, tmp_path):
    """The page of a service with the real solver, in a fresh window."""
    settings = Settings(port=0, database=str(tmp_path / "p.db"), workers=1, log_level="error")
    with background(settings) as url:
        browser.resize(1280, 900)
        browser.dark(False)
        browser.open(url)
        browser.run("sessionStorage.clear()")
        browser.url = url
        yield browser
        assert [line for line in browser.log() if "401" not in line and "422" not in line] == []


def ask_example(page):
    page.click("#example")
    page.until("document.querySelectorAll('#current .node').length === 4")


@needs_chromium
def test_a_profile_is_dropped_and_its_placement_shown(page):
    profile = {**examples.requests()["throughput"]["value"]["profile"], "model": "<img src=x onerror=document.title=1>"}
    profile["cluster"] = examples.requests()["throughput"]["value"]["cluster"]
    page.run(
        "const data = new DataTransfer(); data.items.add(new File([arguments[0]], 'profile.json'));"
        "document.querySelector('#drop').dispatchEvent(new DragEvent('drop', {dataTransfer: data, bubbles: true}))",
        json.dumps(profile),
    )
    page.until("document.querySelectorAll('#current .node').length === 4")
    request = PlacementRequest.model_validate({"profile": profile})
    stored = httpx.get(f"{page.url}/v1/placements/{request.content_hash()}").json()
    rows = "[...document.querySelectorAll('#current tbody tr')]"
    placed = page.run(f"return {rows}.map(row => [...row.cells].map(cell => cell.textContent))")
    assert [tuple(row) for row in placed] == list(stored["layer_devices"].items())
    assert "optimal" in page.text("#progress")
    assert page.run("return document.title") == "Placer"  # the model's name was text, not HTML


@needs_chromium
def test_the_bars_are_as_long_as_what_they_show(page):
    ask_example(page)
    key = PlacementRequest.model_validate(examples.requests()["throughput"]["value"]).content_hash()
    loads = httpx.get(f"{page.url}/v1/placements/{key}").json()["devices"]
    for kind in ("compute", "send", "receive"):
        drawn = page.run(
            f"return [...document.querySelectorAll('#current g .{kind}')].map(e => +e.getAttribute('width'))"
        )
        scale = drawn[0] / loads[0][f"{kind}_ms"]
        assert drawn == pytest.approx([scale * load[f"{kind}_ms"] for load in loads])


@needs_chromium
def test_each_knob_solves_again(page):
    ask_example(page)
    first = page.text("#current .facts")
    page.set("#devices", 1)
    page.until("document.querySelectorAll('#current svg .compute').length === 2")  # one device, and the legend
    page.set("#devices", 3)
    page.until("document.querySelectorAll('#current svg .compute').length === 4")
    page.set("#memory", 2)
    page.until("document.querySelector('#progress').textContent.includes('no placement')")
    assert "short" in page.text("#current")
    page.set("#memory", 16)
    page.set("#devices", 2)
    page.until(f"document.querySelector('#current .facts')?.textContent.slice(0, 40) === {json.dumps(first[:40])}")
    before = page.run("return [...document.querySelectorAll('#current g > text.value')].map(e => e.textContent)")
    page.set("#chunks", 1)
    page.until(
        "JSON.stringify([...document.querySelectorAll('#current g > text.value')].map(e => e.textContent)) !== "
        + json.dumps(json.dumps(before, separators=(",", ":")))
    )


@needs_chromium
def test_a_layer_is_pinned_from_the_graph_with_the_keyboard(page):
    ask_example(page)
    page.run("document.querySelector('#current .node').focus()")
    page.press("\ue014")  # arrow right
    label = "document.activeElement.getAttribute('aria-label')"
    assert page.run(f"return {label}").startswith("block.0 on cuda:")
    page.press("\ue007")  # enter
    assert page.run("return document.querySelector('#pin-layer').value") == "block.0"
    page.set("#pin-device", "cuda:1")
    page.run("document.querySelector('#pin').focus()")
    page.press("\ue007")
    page.until("document.querySelector('#current .pinned')?.getAttribute('aria-label') === 'block.0 on cuda:1, pinned'")
    page.click("#pins button")
    page.until("!document.querySelector('#current .pinned')")


@needs_chromium
def test_two_placements_stand_side_by_side_and_what_differs_is_marked(page):
    ask_example(page)
    page.click("#keep")
    page.set("#devices", 1)
    page.until("document.querySelector('#moves').textContent.includes('2 of 4 layers')")
    page.until("document.querySelectorAll('#kept .moved').length === 2")
    left, right = page.run(
        "return ['kept', 'current'].map(id => document.getElementById(id).getBoundingClientRect())"
        ".map(r => [r.left, r.right, r.top])"
    )
    assert left[1] <= right[0]
    assert left[2] == right[2]
    page.click("#forget")
    assert page.run("return document.querySelector('#kept').hidden")


@needs_chromium
def test_a_past_placement_is_found_and_answered_from_the_store(page):
    body = examples.requests()["latency"]["value"]
    body["profile"]["model"] = "Older"
    placed = httpx.post(f"{page.url}/v1/placements", json=body).json()
    httpx.post(f"{page.url}/v1/placements", json=examples.requests()["throughput"]["value"])
    page.click("#past summary")
    page.until("document.querySelectorAll('#list button').length === 2")
    page.set("#search", "older")
    page.until("document.querySelectorAll('#list button').length === 1")
    page.click("#list button")
    page.until("document.querySelectorAll('#current .node').length === 4")
    assert "placer_cache_hits_total 1.0" in httpx.get(f"{page.url}/metrics").text
    assert Placement.model_validate(placed).objective == "latency"


@needs_chromium
def test_a_file_that_is_no_profile_is_told(page):
    for text, words in (("{", "is not JSON"), ("{}", "neither a profile nor"), ('{"layers": [1]}', "has a cluster")):
        page.run(
            "const data = new DataTransfer(); data.items.add(new File([arguments[0]], 'x.json'));"
            "document.querySelector('#drop').dispatchEvent(new DragEvent('drop', {dataTransfer: data, bubbles: true}))",
            text,
        )
        page.until(
            "!document.querySelector('#error').hidden"
            f" && document.querySelector('#error').textContent.includes('{words}')"
        )


@needs_chromium
def test_the_downloads_are_what_is_shown(page):
    ask_example(page)
    page.run(
        "window.saved = []; const make = URL.createObjectURL;"
        "URL.createObjectURL = blob => { blob.text().then(text => saved.push(text)); return make(blob); }"
    )
    buttons = ("#save-placement", "#save-request", "#save-trace", "#save-report")
    for number, button in enumerate(buttons, 1):
        page.click(button)
        page.until(f"saved.length === {number}")
    placement, request, trace, report = page.run("return saved")
    found = Placement.model_validate_json(placement)
    assert found.id == PlacementRequest.model_validate_json(request).content_hash()
    assert {event["ph"] for event in json.loads(trace)["traceEvents"]} >= {"X", "M"}
    assert report == html_report(found, PlacementRequest.model_validate_json(request).profile)  # as the command line's


@needs_chromium
def test_the_timeline_has_a_bar_for_each_pass_as_long_as_it_takes(page):
    ask_example(page)
    key = PlacementRequest.model_validate(examples.requests()["throughput"]["value"]).content_hash()
    timeline = httpx.get(f"{page.url}/v1/placements/{key}/timeline").json()
    page.until("document.querySelector('#current .lanes')")
    drawn = page.run(
        "return [...document.querySelectorAll('#current .lanes .pass')]"
        ".map(e => [+e.getAttribute('x'), +e.getAttribute('width')])"
    )
    scale = sum(width for _, width in drawn) / sum(p["end_ms"] - p["start_ms"] for p in timeline["passes"])
    left = min(x for x, _ in drawn)
    expected = [(left + scale * p["start_ms"], scale * (p["end_ms"] - p["start_ms"])) for p in timeline["passes"]]
    assert sorted(drawn) == [pytest.approx(pair, abs=0.01) for pair in sorted(expected)]
    told = page.run("return document.querySelector('#current .lanes svg').getAttribute('aria-label')")
    for spent in timeline["devices"]:
        assert f"{spent['device']}: " in told
    assert f"{100 * timeline['bubble']:.1f} %" in page.text("#current .timeline .why")


@needs_chromium
def test_the_timeline_zooms_and_scrolls_with_the_keyboard(page):
    ask_example(page)
    page.until("document.querySelector('#current .zoom input')")
    page.run("document.querySelector('#current .zoom input').focus()")
    page.press("\ue014", "\ue014", "\ue014", "\ue014")  # arrow right
    page.run("document.querySelector('#current .lanes').focus()")
    page.press("\ue014")
    page.until("document.querySelector('#current .lanes').scrollLeft > 0")
    assert page.run("return document.documentElement.scrollWidth <= innerWidth")


@needs_chromium
def test_what_would_help_is_found_out_when_asked(page):
    page.run(
        "const data = new DataTransfer(); data.items.add(new File([arguments[0]], 'request.json'));"
        "document.querySelector('#drop').dispatchEvent(new DragEvent('drop', {dataTransfer: data, bubbles: true}))",
        json.dumps(examples.requests()["throughput"]["value"] | {"chunks": 4}),
    )
    page.until("document.querySelectorAll('#current .node').length === 4")
    page.click("#explain")
    page.until("document.querySelector('#current .helps')")
    request = PlacementRequest.model_validate(
        examples.requests()["throughput"]["value"] | {"chunks": 4, "explain": True}
    )
    stored = httpx.get(f"{page.url}/v1/placements/{request.content_hash()}").json()
    assert page.text("#current .why") == f"Limited by {stored['limits']['what']}."
    assert page.run("return document.querySelectorAll('#current .helps li').length") == len(stored["limits"]["helps"])


@needs_chromium
def test_a_whole_batch_is_asked_for_and_back(page):
    ask_example(page)
    page.set("#schedule", "auto")  # refused by every other objective, so it is 1f1b as yet
    page.set("#objective", "step")
    page.until("document.querySelector('#current .facts')?.textContent.includes('Whole batch')")
    page.until("document.querySelectorAll('#current .lanes .pass').length > 0")
    page.set("#objective", "latency")
    page.until("document.querySelector('#current .facts')?.textContent.includes('One sample')")
    assert page.run("return document.querySelector('#error').hidden")


@needs_chromium
def test_each_of_two_placements_has_its_own_timeline(page):
    ask_example(page)
    page.until("document.querySelectorAll('#current .lanes .idle').length === 2")
    page.click("#keep")
    page.set("#devices", 1)
    page.until("document.querySelectorAll('#current .lanes .idle').length === 1")
    page.until("document.querySelectorAll('#kept .lanes .idle').length === 2")


@needs_chromium
def test_whatever_can_be_used_or_seen_has_a_name_for_those_who_hear_the_page(page):
    ask_example(page)
    page.until("document.querySelector('#current .lanes')")
    tree = page.call("goog/cdp/execute", cmd="Accessibility.getFullAXTree", params={})["nodes"]
    shown = [node for node in tree if not node["ignored"]]
    roles = {
        "button",
        "textbox",
        "searchbox",
        "combobox",
        "spinbutton",
        "checkbox",
        "slider",
        "image",
        "link",
        "region",
    }
    named = [(node["role"]["value"], node["name"]["value"]) for node in shown if node["role"]["value"] in roles]
    assert {role for role, _ in named} >= {"button", "combobox", "spinbutton", "checkbox", "slider", "image", "region"}
    assert [role for role, name in named if not name.strip()] == []


@needs_chromium
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_at_phone_width_nothing_is_wider_than_the_page_and_text_can_be_read(page, dark):
    page.dark(dark)
    page.resize(390, 844)
    ask_example(page)
    page.until("document.querySelector('#current .lanes')")
    assert page.run("return document.documentElement.scrollWidth") == 390
    bars = "document.querySelector('#current .bars > svg')"
    assert page.run(f"return 12 * {bars}.getBoundingClientRect().width / {bars}.viewBox.baseVal.width") > 11.5  # pixels
    contrast = (
        "const luminance = c => { const [r, g, b] = c.match(/[\\d.]+/g).map(v => v / 255)"
        ".map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);"
        "return 0.2126 * r + 0.7152 * g + 0.0722 * b; };"
        "const back = luminance(getComputedStyle(document.body).backgroundColor);"
        "return [...document.querySelectorAll('h1, p, label, dt, dd, small, button')].map(e => {"
        "const text = luminance(getComputedStyle(e).color);"
        "return (Math.max(text, back) + 0.05) / (Math.min(text, back) + 0.05); })"
    )
    assert min(page.run(contrast)) >= 4.5  # WCAG AA
    background = page.run("return getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") != dark


@needs_chromium
def test_where_a_key_is_needed_the_page_asks_for_it(browser, tmp_path):
    from placer_server.keys import make

    key, line = make("someone")
    (tmp_path / "keys").write_text(line)
    settings = Settings(port=0, database=":memory:", workers=1, log_level="error", keys_file=str(tmp_path / "keys"))
    with background(settings) as url:
        browser.open(url)
        browser.run("sessionStorage.clear()")
        browser.click("#example")
        browser.until("!document.querySelector('#key-form').hidden")
        browser.run("document.querySelector('#key').value = arguments[0]", key)
        browser.click("#key-form button")
        browser.until("document.querySelectorAll('#current .node').length === 4")
        browser.log()
