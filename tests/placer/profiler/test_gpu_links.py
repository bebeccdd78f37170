"""On real devices: links under load, the way by the host's memory, and profiles from the cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from corruption import corrupt

import placer
from placer import devices, zoo
from placer.devices import routes
from placer.profiler import measure
from placer.profiler.links.link_probe import through_host
from placer.profiler.links.links import measure_links
from placer.profiler.profile import profile

pytestmark = [pytest.mark.gpu, pytest.mark.alone]


@pytest.fixture(autouse=True)
def no_detours_left() -> Iterator[None]:
    yield
    routes._detours.clear()


@pytest.fixture
def pair() -> list[torch.device]:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    return [torch.device("cuda", 0), torch.device("cuda", 1)]


def test_links_are_measured_under_every_load_and_to_the_host(pair: list[torch.device]) -> None:
    found = measure_links(pair, lambda _: None)
    for link in found.links:
        print(link)
        assert link.route == "direct"
        assert (
            link.bidirectional is not None
            and link.computing is not None
            and link.bidirectional_computing is not None
        )
        assert link.bandwidth_bytes_per_s > 1e9
        assert 0 <= link.latency_s < 1e-3
        # Company never makes a link faster than it is alone, but for the scatter of measurements.
        for loaded in (link.bidirectional, link.computing, link.bidirectional_computing):
            assert 1e8 < loaded.bandwidth_bytes_per_s < 1.3 * link.bandwidth_bytes_per_s
    for device in pair:
        print(device, found.ports[device])
        assert found.ports[device].to_host.bandwidth_bytes_per_s > 1e9
        assert found.ports[device].from_host.bandwidth_bytes_per_s > 1e9


def test_measuring_links_leaves_no_memory_behind(pair: list[torch.device]) -> None:
    measure_links(pair, lambda _: None)
    before = [torch.cuda.memory_allocated(device) for device in pair]
    measure_links(pair, lambda _: None)
    assert [torch.cuda.memory_allocated(device) for device in pair] == before


def test_copies_by_way_of_the_host_arrive_whole(pair: list[torch.device]) -> None:
    devices.detour(*pair)
    courier = devices.Courier()
    target = torch.empty(1 << 20, device=pair[1])
    mark = None
    for value in range(20):
        source = torch.full((1 << 20,), float(value), device=pair[0])
        ready = devices.Lane(pair[0], caller=True).mark()
        mark = courier.send(source, ready, target, mark, "values")
        caller = devices.Lane(pair[1], caller=True)
        caller.wait(mark)
        assert torch.equal(target, torch.full((1 << 20,), float(value), device=pair[1]))
        mark = caller.mark()
    moved = devices.copy(torch.arange(1000, device=pair[0]), pair[1])
    assert moved.device == pair[1]
    assert torch.equal(moved.cpu(), torch.arange(1000))


def test_a_bad_link_has_the_rate_of_the_way_by_the_host(
    pair: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    corrupt(monkeypatch, ("cuda:0", "cuda:1"))
    found = measure_links(pair, lambda _: None)
    bad, good = found.links
    expected = through_host(found.ports[pair[0]].to_host, found.ports[pair[1]].from_host)
    assert (bad.route, good.route) == ("host", "direct")
    assert bad.bandwidth_bytes_per_s == expected.bandwidth_bytes_per_s
    assert bad.fault


def test_a_model_over_a_bad_link_gives_the_unsplit_models_results(
    pair: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    spoilt = corrupt(monkeypatch, ("cuda:0", "cuda:1"), ("cuda:1", "cuda:0"))
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)).double()
    x, target = torch.randn(16, 64).double(), torch.randn(16, 8).double()
    loss_fn = torch.nn.functional.mse_loss
    expected = loss_fn(model(x), target)
    gradients = torch.autograd.grad(expected, list(model.parameters()))
    for source, other in (pair, pair[::-1]):
        devices.detour(source, other)
    flow = placer.DataFlow(model, device_ids=["cuda:0", "cuda:1"])
    flow.layer_gpus.update({"0": 0, "1": 1})
    flow.update_flow()
    loss = flow.train_step(loss_fn)(x, target, chunks=4)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-10)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert parameter.grad is not None
        assert torch.allclose(parameter.grad.cpu(), gradient, rtol=1e-10)
    assert spoilt() == 0


def test_a_second_profile_takes_everything_from_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, x = zoo.resnet18(10), torch.randn(4, 3, 64, 64)
    first = profile(model, x, ["cuda:0"], progress=False, cache=tmp_path)
    monkeypatch.setattr(measure, "measure_trial", lambda *_: pytest.fail("a layer was measured"))
    monkeypatch.setattr(
        measure, "bring_state", lambda *_: pytest.fail("a layer was brought to the device")
    )
    assert profile(model, x, ["cuda:0"], progress=False, cache=tmp_path).layers == first.layers


def test_a_device_tells_what_its_speed_depends_on() -> None:
    facts = devices.speed_facts(torch.device("cuda", 0))
    assert facts["name"] == torch.cuda.get_device_name(0)
    assert int(facts["memory"]) > 0 and int(facts["multiprocessors"]) > 0
    assert facts["driver"]
    assert devices.place(torch.device("cuda", 0)) != devices.place(torch.device("cpu", 0))
