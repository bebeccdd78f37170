"""The page in a real Chromium, if one is installed."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import get_args

import httpx
import pytest
import solvers_for_tests
from browser import CHROMIUM, DRIVER, browsing
from replicas_by_stage import two_to_one

import placer_server
from placer.report.page import html_report
from placer.schema import Objective, Placement, PlacementRequest
from placer.solver.solve import solve
from placer_server.app import background
from placer_server.openapi import examples
from placer_server.settings import Settings

pytestmark = pytest.mark.integration

needs_chromium = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="chromium and chromedriver are not installed"
)

SOURCES = Path(placer_server.__path__[0]) / "page"


def test_the_page_and_its_files_are_served_with_their_types_and_tags(serve):
    client = serve()
    page = client.get("/")
    assert page.headers["Content-Type"].startswith("text/html")
    for path in re.findall(r'(?:href|src)="(page/[^"]+)"', page.text):
        reply = client.get(f"/{path}")
        assert reply.status_code == 200
        assert (
            client.get(f"/{path}", headers={"If-None-Match": reply.headers["ETag"]}).status_code
            == 304
        )
    assert client.get("/page/../settings.py").status_code == 404
    assert client.get("/page/nothing.js").status_code == 404


def test_the_page_asks_no_other_host_and_needs_no_inline_code():
    for file in SOURCES.iterdir():
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//[a-z]+\.|innerHTML\s*=|\beval\(|style=\"", text), (
            file.name
        )
    assert "<script>" not in (SOURCES / "index.html").read_text()


def test_every_input_of_the_page_has_a_label():
    text = (SOURCES / "index.html").read_text()
    fields = re.findall(r'<(?:input|select)[^>]*\bid="([^"]+)"', text)
    assert len(fields) > 8
    assert set(fields) <= set(re.findall(r'<label for="([^"]+)"', text))


def test_the_page_offers_every_objective():
    text = (SOURCES / "index.html").read_text()
    (select,) = re.findall(r'<select id="objective">(.*?)</select>', text, re.DOTALL)
    assert set(re.findall(r'value="([^"]+)"', select)) == set(get_args(Objective))


@pytest.fixture(scope="module")
def browser():
    with browsing() as browser:
        yield browser


@pytest.fixture
def page(browser, tmp_path):
    """Open the page of a service with the real solver in a fresh window."""
    settings = Settings(port=0, database=str(tmp_path / "p.db"), workers=1, log_level="error")
    with background(settings) as url:
        browser.resize(1280, 900)
        browser.dark(False)
        browser.open(url)
        browser.run("sessionStorage.clear()")
        browser.url = url
        yield browser
        lines = [line for line in browser.log() if "401" not in line and "422" not in line]
        # Otherwise the page would ask the service after its end, and the next test would see that.
        browser.open("about:blank")
        assert lines == []


def ask_example(page):
    page.click("#example")
    page.until("document.querySelectorAll('#current .node').length === 4")


@needs_chromium
def test_a_profile_is_dropped_and_its_placement_shown(page):
    profile = {
        **examples.requests()["throughput"]["value"]["profile"],
        "model": "<img src=x onerror=document.title=1>",
    }
    profile["cluster"] = examples.requests()["throughput"]["value"]["cluster"]
    page.run(
        "const data = new DataTransfer(); data.items.add(new File([arguments[0]], 'profile.json'));"
        "document.querySelector('#drop').dispatchEvent(new DragEvent('drop', {dataTransfer: "
        "data, bubbles: true}))",
        json.dumps(profile),
    )
    page.until("document.querySelectorAll('#current .node').length === 4")
    # four for each device
    request = PlacementRequest.model_validate({"profile": profile, "chunks": 8})
    assert page.run("return document.querySelector('#chunks').value") == "8"
    stored = httpx.get(f"{page.url}/v1/placements/{request.content_hash()}").json()
    rows = "[...document.querySelectorAll('#current tbody tr')]"
    placed = page.run(f"return {rows}.map(row => [...row.cells].map(cell => cell.textContent))")
    assert [tuple(row) for row in placed] == list(stored["layer_devices"].items())
    assert "optimal" in page.text("#progress")
    # the model's name was text, not HTML
    assert page.run("return document.title") == "Placer"


@needs_chromium
def test_the_bars_are_as_long_as_what_they_show(page):
    ask_example(page)
    key = PlacementRequest.model_validate(examples.requests()["throughput"]["value"]).content_hash()
    loads = httpx.get(f"{page.url}/v1/placements/{key}").json()["devices"]
    for kind in ("compute", "send", "receive"):
        drawn = page.run(
            f"return [...document.querySelectorAll('#current g .{kind}')].map(e => "
            f"+e.getAttribute('width'))"
        )
        scale = drawn[0] / loads[0][f"{kind}_ms"]
        assert drawn == pytest.approx([scale * load[f"{kind}_ms"] for load in loads])


@needs_chromium
def test_each_knob_solves_again(page):
    ask_example(page)
    first = page.text("#current .facts")
    page.set("#devices", 1)
    # one device, and the legend
    page.until("document.querySelectorAll('#current svg .compute').length === 2")
    page.set("#devices", 3)
    page.until("document.querySelectorAll('#current svg .compute').length === 4")
    page.set("#memory", 2)
    page.until("document.querySelector('#progress').textContent.includes('no placement')")
    assert "missing" in page.text("#current")
    page.set("#memory", 16)
    page.set("#devices", 2)
    page.until(
        f"document.querySelector('#current .facts')?.textContent.slice(0, 40) === "
        f"{json.dumps(first[:40])}"
    )
    before = page.run(
        "return [...document.querySelectorAll('#current g > text.value')].map(e => e.textContent)"
    )
    page.set("#chunks", 1)
    page.until(
        "JSON.stringify([...document.querySelectorAll('#current g > text.value')].map(e => "
        "e.textContent)) !== " + json.dumps(json.dumps(before, separators=(",", ":")))
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
    page.until(
        "document.querySelector('#current .pinned')?.getAttribute('aria-label') === 'block.0 on "
        "cuda:1, pinned'"
    )
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
    for text, words in (
        ("{", "is not JSON"),
        ("{}", "neither a profile nor"),
        ('{"layers": [1]}', "has a cluster"),
    ):
        page.run(
            "const data = new DataTransfer(); data.items.add(new File([arguments[0]], 'x.json'));"
            "document.querySelector('#drop').dispatchEvent(new DragEvent('drop', {dataTransfer: "
            "data, bubbles: true}))",
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
        "URL.createObjectURL = blob => { blob.text().then(text => saved.push(text)); return "
        "make(blob); }"
    )
    buttons = ("#save-placement", "#save-request", "#save-trace", "#save-report")
    for number, button in enumerate(buttons, 1):
        page.click(button)
        page.until(f"saved.length === {number}")
    placement, request, trace, report = page.run("return saved")
    found = Placement.model_validate_json(placement)
    assert found.id == PlacementRequest.model_validate_json(request).content_hash()
    assert {event["ph"] for event in json.loads(trace)["traceEvents"]} >= {"X", "M"}
    # as the command line's
    assert report == html_report(found, PlacementRequest.model_validate_json(request).profile)


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
    scale = sum(width for _, width in drawn) / sum(
        p["end_ms"] - p["start_ms"] for p in timeline["passes"]
    )
    left = min(x for x, _ in drawn)
    expected = [
        (left + scale * p["start_ms"], scale * (p["end_ms"] - p["start_ms"]))
        for p in timeline["passes"]
    ]
    assert sorted(drawn) == [pytest.approx(pair, abs=0.01) for pair in sorted(expected)]
    told = page.run(
        "return document.querySelector('#current .lanes svg').getAttribute('aria-label')"
    )
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
        "document.querySelector('#drop').dispatchEvent(new DragEvent('drop', {dataTransfer: "
        "data, bubbles: true}))",
        json.dumps(examples.requests()["throughput"]["value"] | {"chunks": 4}),
    )
    page.until("document.querySelectorAll('#current .node').length === 4")
    page.click("#explain")
    page.until("document.querySelector('#current .improvements')")
    request = PlacementRequest.model_validate(
        examples.requests()["throughput"]["value"] | {"chunks": 4, "explain": True}
    )
    stored = httpx.get(f"{page.url}/v1/placements/{request.content_hash()}").json()
    assert page.text("#current .why") == f"Limited by {stored['limits']['detail']}."
    assert page.run("return document.querySelectorAll('#current .improvements li').length") == len(
        stored["limits"]["improvements"]
    )


def timeline_of(page, request):
    key = PlacementRequest.model_validate(request).content_hash()
    return httpx.get(f"{page.url}/v1/placements/{key}/timeline").json()


def fact(page, name):
    """Return the value below a heading of the answer once it is there."""
    found = (
        "[...document.querySelectorAll('#current .facts div')]"
        ".find(e => e.firstChild.textContent === %s)"
    )
    return page.until(
        f"{found % json.dumps(name)}?.querySelector('dd:not(:has([aria-busy]))')?.textContent"
    )


def drop(page, content):
    page.run(
        "const data = new DataTransfer(); data.items.add(new File([arguments[0]], 'request.json'));"
        "document.querySelector('#drop').dispatchEvent(new DragEvent('drop', {dataTransfer: "
        "data, bubbles: true}))",
        json.dumps(content),
    )


@needs_chromium
def test_replicas_by_stage_have_a_row_of_the_timeline_each(page):
    request = two_to_one(examples.requests()["throughput"]["value"])
    drop(page, request)
    assert fact(page, "Replicas") == "2-1 by stage"
    devices = [one["device"] for one in timeline_of(page, request)["devices"]]
    assert devices == ["cuda:0", "cuda:1", "cuda:2"]
    page.until(
        "document.querySelectorAll('#current .timeline .idle[x]').length === " + str(len(devices))
    )


def is_current(page):
    """Wait for the answer to the current controls, including its timeline."""
    page.until("document.querySelector('#current:not(.old)[aria-busy=false] .facts')")
    return fact(page, "Compared with one device")


def shown_buttons(page):
    return page.run(
        "return [...document.querySelectorAll('#actions button')].filter(e => "
        "e.checkVisibility()).map(e => e.id)"
    )


def trained(**changes):
    """Return the example with an optimizer time of 1 ms per layer."""
    request = examples.requests()["throughput"]["value"] | changes
    layers = [layer | {"optimizer_ms": {"gpu": 1.0}} for layer in request["profile"]["layers"]]
    return request | {"profile": request["profile"] | {"layers": layers}}


@needs_chromium
@pytest.mark.parametrize("chunks", [1, 2, 16])
@pytest.mark.parametrize("objective", ["throughput", "latency", "memory"])
def test_the_headline_compares_a_batch_with_one_device(page, chunks, objective):
    # It compared the bottleneck: "2.00 x" stood above the timeline of one micro-batch, which two
    # devices do no sooner.
    request = trained(chunks=chunks, objective=objective)
    drop(page, request)
    page.until("document.querySelectorAll('#current .node').length === 4")
    shown = timeline_of(page, request)
    # 5 ms forwards and 10 ms backwards, and an optimizer of 4 ms
    alone_ms = chunks * 15 + 4
    assert shown["single_device_ms"] == pytest.approx(alone_ms)
    assert (
        fact(page, "Compared with one device")
        == f"{alone_ms / shown['step_ms']:.2f} \N{MULTIPLICATION SIGN} as fast"
    )
    if chunks == 1 and objective == "throughput":
        assert alone_ms / shown["step_ms"] < 1.2
    assert fact(page, "Whole batch") == f"{shown['step_ms']:.4g} ms"


@needs_chromium
def test_of_a_whole_batch_the_headline_is_the_placements_own(page):
    request = trained(objective="step", schedule="auto", chunks=8)
    drop(page, request)
    page.until("document.querySelectorAll('#current .node').length === 4")
    key = PlacementRequest.model_validate(request).content_hash()
    placement = httpx.get(f"{page.url}/v1/placements/{key}").json()
    assert (
        fact(page, "Compared with one device")
        == f"{placement['speedup']:.2f} \N{MULTIPLICATION SIGN} as fast"
    )
    assert fact(page, "Whole batch") == f"{placement['objective_value']:.4g} ms"


@needs_chromium
def test_a_single_device_that_is_too_small_is_told_in_the_headline(page):
    request = examples.requests()["throughput"]["value"] | {"chunks": 4}
    devices = [device | {"memory_bytes": 8 * 2**30} for device in request["cluster"]["devices"]]
    drop(page, request | {"cluster": request["cluster"] | {"devices": devices}})
    assert fact(page, "Compared with one device").endswith(
        "\N{MULTIPLICATION SIGN} as fast, which has too little memory"
    )


@needs_chromium
def test_the_optimizer_is_drawn_after_the_last_pass(page):
    request = trained(chunks=4)
    drop(page, request)
    page.until("document.querySelectorAll('#current .lanes .optimizer').length === 2")
    shown = timeline_of(page, request)
    bars = page.run(
        "return ['pass', 'optimizer'].map(kind => [...document.querySelectorAll(`#current "
        ".lanes .${kind}`)]"
        ".map(e => [+e.getAttribute('x'), +e.getAttribute('x') + +e.getAttribute('width')]))"
    )
    assert min(start for start, _ in bars[1]) == pytest.approx(
        max(end for _, end in bars[0]), abs=0.01
    )
    longest = max(spent["optimizer_ms"] for spent in shown["devices"])
    width = max(end - start for start, end in bars[1])
    assert width / (
        max(end for _, end in bars[1]) - min(start for start, _ in bars[0])
    ) == pytest.approx(longest / shown["step_ms"], abs=1e-3)


@needs_chromium
def test_buttons_without_a_function_are_not_shown(page):
    # The rule of their layout showed them whatever their attribute said, and before there was a
    # placement to save.
    assert shown_buttons(page) == []
    ask_example(page)
    saves = ["save-placement", "save-request", "save-trace", "save-report"]
    is_current(page)
    assert shown_buttons(page) == ["keep", *saves]
    page.click("#keep")
    page.until("!document.querySelector('#forget').hidden")
    # the same placement cannot be kept again
    assert shown_buttons(page) == ["forget", *saves]
    page.set("#devices", 1)
    page.until("document.querySelector('#moves').textContent.includes('2 of 4 layers')")
    assert shown_buttons(page) == ["keep", "forget", *saves]
    page.click("#forget")
    page.set("#memory", 0.1)
    page.until("document.querySelector('#progress').textContent.includes('no placement')")
    # nothing to keep, and no timeline
    assert shown_buttons(page) == ["save-placement", "save-request", "save-report"]
    page.run(
        "window.saved = []; const make = URL.createObjectURL;"
        "URL.createObjectURL = blob => { blob.text().then(text => saved.push(text)); return "
        "make(blob); }"
    )
    page.click("#save-report")
    page.until("saved.length === 1")
    assert "no placement is possible" in page.run("return saved[0]")


GENERATION = "document.querySelector('#objective option[value=generation]')"


def answered(page, **changes):
    """Wait for the value of the example's generation with changed options."""
    content = examples.requests()["generation"]["value"]
    request = PlacementRequest.model_validate(
        content | {"generation": content["generation"] | changes}
    )
    value = solve(request).objective_value
    page.until(f"document.querySelector('#progress').textContent.includes('{value:.4g} ms')")
    return value


@needs_chromium
def test_texts_are_placed_where_the_request_has_a_pass_of_one_token(page):
    ask_example(page)
    assert page.run(f"return {GENERATION}.disabled && {GENERATION}.hidden")
    drop(page, examples.requests()["generation"]["value"])
    page.until(f"!{GENERATION}.disabled")
    shown = page.run(
        "return ['objective', 'prompt', 'tokens', 'sequences', 'chunks'].map(id => "
        "[document.getElementById(id).value, document.getElementById(id).checkVisibility()])"
    )
    assert shown[:-1] == [["generation", True], ["512", True], ["64", True], ["4", True]]
    assert not shown[-1][1]
    first = answered(page)
    page.set("#sequences", 1)
    assert answered(page, sequences_in_flight=1) > first
    page.set("#tokens", 32)
    assert answered(page, sequences_in_flight=1, new_tokens=32) < first * 2
    page.set("#objective", "latency")
    page.until("document.querySelector('#current .facts')?.textContent.includes('One sample')")
    assert not page.run("return document.querySelector('#tokens').checkVisibility()")
    page.set("#objective", "generation")
    answered(page, sequences_in_flight=1, new_tokens=32)
    page.click("#example")
    page.until(f"{GENERATION}.disabled && {GENERATION}.hidden")


@needs_chromium
@pytest.mark.parametrize(
    ("field", "value"), [("tokens", 65), ("tokens", 0), ("tokens", 1.5), ("sequences", 0)]
)
def test_texts_that_are_none_are_marked(page, field, value):
    drop(page, examples.requests()["generation"]["value"])
    answered(page)
    page.set(f"#{field}", value)
    page.until(f"document.querySelector('#{field}[aria-invalid] ~ .fault')")
    page.until("document.querySelector('#progress').textContent.includes('Correct the marked')")
    # The value is not asked under another objective, and is still marked afterwards.
    page.set("#objective", "latency")
    page.until("document.querySelector('#current .facts')?.textContent.includes('One sample')")
    page.set("#objective", "generation")
    page.until(f"document.querySelector('#{field}[aria-invalid]')")
    page.set(f"#{field}", 4)
    answered(page, **{"tokens": {"new_tokens": 4}, "sequences": {}}[field])


@needs_chromium
def test_schedules_are_offered_where_they_have_a_function(page):
    ask_example(page)
    option = "document.querySelector('#schedule option[value=auto]')"
    assert page.run(f"return {option}.disabled && {option}.hidden")
    page.set("#objective", "step")
    page.until("document.querySelector('#schedule').value === 'auto'")
    assert not page.run(f"return {option}.disabled")
    page.set("#objective", "latency")
    page.until("document.querySelector('#schedule').value === '1f1b'")
    # inference, whose passes have one order
    drop(page, examples.requests()["latency"]["value"])
    page.until("document.querySelector('#subject').textContent.includes('inference')")
    is_current(page)
    assert not page.run("return document.querySelector('#schedule').checkVisibility()")


@needs_chromium
@pytest.mark.parametrize(
    ("knob", "value"),
    [("#devices", "0"), ("#devices", "1.5"), ("#memory", "-1"), ("#chunks", "0"), ("#limit", "")],
)
def test_a_what_if_value_that_cannot_be_is_marked_and_not_asked_for(page, knob, value):
    # It was passed over without a word, and the answer on the page was another question's.
    ask_example(page)
    is_current(page)
    before = page.run(f"return document.querySelector('{knob}').value")
    asked = httpx.get(f"{page.url}/v1/placements").json()["placements"]
    page.set(knob, value)
    assert (
        page.run(f"return document.querySelector('{knob}').getAttribute('aria-invalid')") == "true"
    )
    told = page.run(
        f"return "
        f"document.getElementById(document.querySelector('{knob}').getAttribute('aria-describedby')).textContent"
    )
    assert told and page.run("return document.querySelector('#current').classList.contains('old')")
    page.until(
        "document.querySelector('#progress').textContent.includes('Correct the marked values')"
    )
    page.set("#objective", "latency")  # another change does not ask for it either
    time.sleep(0.6)
    assert page.run("return document.querySelector('#current').classList.contains('old')")
    assert httpx.get(f"{page.url}/v1/placements").json()["placements"] == asked
    page.set("#objective", "throughput")
    page.set(knob, before)
    assert is_current(page)
    assert (
        page.run("return document.querySelectorAll('#knobs [aria-invalid], #knobs .fault').length")
        == 0
    )


@needs_chromium
def test_memory_below_what_libraries_keep_is_marked(page):
    # It was raised to that without a word.
    request = examples.requests()["throughput"]["value"]
    devices = [device | {"reserve_bytes": 2**30} for device in request["cluster"]["devices"]]
    drop(page, request | {"cluster": request["cluster"] | {"devices": devices}})
    is_current(page)
    page.set("#memory", 0.5)
    assert "1" in page.text("#memory-fault")


@needs_chromium
def test_a_value_that_the_service_refuses_is_marked_until_the_next_question(page):
    ask_example(page)
    is_current(page)
    page.set("#limit", 4000)
    page.until("document.querySelector('#limit').getAttribute('aria-invalid') === 'true'")
    assert "at most 3600" in page.text("#limit-fault")
    assert page.run("return document.querySelector('#current').classList.contains('old')")
    page.set("#limit", 5)
    assert is_current(page)
    assert page.run("return document.querySelectorAll('#knobs [aria-invalid]').length") == 0


@needs_chromium
def test_a_pin_to_a_device_that_is_no_longer_there_is_marked(page):
    drop(
        page,
        examples.requests()["throughput"]["value"]
        | {"constraints": {"pinned": {"head": "cuda:1"}}},
    )
    is_current(page)
    page.set("#devices", 1)
    page.until(
        "document.querySelector('#pins .gone')?.textContent.includes('cuda:1, which does not "
        "exist')"
    )
    page.set("#devices", 2)
    page.until("!document.querySelector('#pins .gone')")


@needs_chromium
def test_an_old_answer_is_dimmed_while_a_new_one_is_solved(browser, tmp_path):
    settings = Settings(port=0, database=":memory:", workers=1, log_level="error")
    request = examples.requests()["throughput"]["value"]
    request["profile"]["model"] = str(tmp_path / "notes")
    release = tmp_path / "release"
    with background(settings, solver=solvers_for_tests.noted_until_released) as url:
        browser.open(url)
        browser.run("sessionStorage.clear()")
        drop(browser, request)
        browser.until("document.querySelector('#stop').checkVisibility()")
        # there is nothing else to be done yet
        assert shown_buttons(browser) == ["stop"]
        release.touch()
        is_current(browser)
        release.unlink()
        opacity = "+getComputedStyle(document.querySelector('#current .facts')).opacity"
        assert browser.run(f"return {opacity}") == 1
        browser.set("#chunks", 9)
        assert browser.run(f"return {opacity}") < 0.7  # at once
        browser.until("document.querySelector('#current[aria-busy=true].old')")
        release.touch()
        is_current(browser)
        assert browser.run(f"return {opacity}") == 1
        assert "stop" not in shown_buttons(browser)
        fact(browser, "Whole batch")  # nothing is asked of the service any more
        browser.open("about:blank")
        browser.log()


@needs_chromium
def test_a_whole_batch_is_asked_for_and_back(page):
    ask_example(page)
    # refused by every other objective, so it is 1f1b as yet
    page.set("#schedule", "auto")
    page.set("#objective", "step")
    page.until("document.querySelector('#current .facts')?.textContent.includes('Whole batch')")
    page.until("document.querySelectorAll('#current .lanes .pass').length > 0")
    page.set("#objective", "latency")
    page.until("document.querySelector('#current .facts')?.textContent.includes('One sample')")
    assert page.run("return document.querySelector('#error').hidden")


@needs_chromium
def test_a_whole_batch_of_a_training_loop_becomes_another_objective(page):
    """The kind of step stayed in the request, which only objective "step" accepts."""
    drop(page, trained(objective="step", schedule="auto", step_kind="steady-state", chunks=8))
    page.until("document.querySelectorAll('#current .node').length === 4")
    page.set("#objective", "latency")
    page.until("document.querySelector('#current .facts')?.textContent.includes('One sample')")
    assert page.run("return document.querySelector('#error').hidden")


@needs_chromium
def test_the_fewest_devices_within_a_time_are_asked_for(page):
    ask_example(page)
    is_current(page)
    visible = "return document.querySelector('#bottleneck').checkVisibility()"
    assert not page.run(visible)
    page.set("#objective", "devices")
    page.until("document.querySelector('#current .facts')?.textContent.includes('Devices used')")
    assert page.run(visible)
    assert fact(page, "Devices used") == "2 devices"  # as fast as the placement before
    page.set("#bottleneck", 1_000_000)
    page.until("document.querySelector('#current .facts')?.textContent.includes('1 device')")
    page.set("#bottleneck", "")
    page.set("#objective", "throughput")
    is_current(page)
    assert not page.run(visible)


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
    named = [
        (node["role"]["value"], node["name"]["value"])
        for node in shown
        if node["role"]["value"] in roles
    ]
    assert {role for role, _ in named} >= {
        "button",
        "combobox",
        "spinbutton",
        "checkbox",
        "slider",
        "image",
        "region",
    }
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
    # pixels
    assert (
        page.run(f"return 12 * {bars}.getBoundingClientRect().width / {bars}.viewBox.baseVal.width")
        > 11.5
    )
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
    settings = Settings(
        port=0, database=":memory:", workers=1, log_level="error", keys_file=str(tmp_path / "keys")
    )
    with background(settings) as url:
        browser.open(url)
        browser.run("sessionStorage.clear()")
        browser.click("#example")
        browser.until("!document.querySelector('#key-form').hidden")
        browser.run("document.querySelector('#key').value = arguments[0]", key)
        browser.click("#key-form button")
        browser.until("document.querySelectorAll('#current .node').length === 4")
        browser.log()
