"""Placements for the server's machine of a model that only the client has."""

from __future__ import annotations

import httpx
import pytest
import torch
from torch import nn

from placer.errors import InputError, ServerError, TimeoutExceeded
from placer.profiler.remote.sending import describe
from placer.schema import Cluster, Profile
from placer.schema.graph import ProfileRequest
from placer_client import suggest as module
from placer_client.client import Client
from placer_client.suggest import suggest
from placer_server.app import background
from placer_server.settings import Settings


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


X = torch.randn(4, 8)


@pytest.fixture(scope="module")
def url():
    with background(Settings(port=0, database=":memory:", workers=1, log_level="error")) as url:
        yield url


@pytest.fixture(autouse=True)
def no_server(monkeypatch):
    monkeypatch.delenv("PLACER_URL", raising=False)


def test_the_servers_machine_measures_and_the_placement_is_for_its_devices(url, monkeypatch):
    def nothing_here(*args, **kwargs):
        raise AssertionError("the model was profiled here")

    monkeypatch.setattr(module, "_measure", nothing_here)
    placement = suggest(Block(), X, server=url, profile_on_server=True, devices=2, progress=False)
    assert placement.status == "optimal"
    assert set(placement.layer_devices) == {"first", "second"}
    assert set(placement.layer_devices.values()) <= {"cpu:0", "cpu:1"}


def test_a_model_on_meta_is_measured_too(url):
    with torch.device("meta"):
        model, x = Block(), torch.empty(4, 8)
    placement = suggest(
        model, x, server=url, profile_on_server=True, training=False, progress=False
    )
    assert placement.status == "optimal"


def test_several_batch_sizes_are_measured_there(url):
    graphs = describe(Block(), X, batch_sizes=[2, 8])
    with Client(url) as client:
        profiles = [client.profile(ProfileRequest(graph=graph, repeats=1)) for graph in graphs]
    assert [profile.batch_size for profile in profiles] == [2, 8]
    assert profiles[1].edges[0].bytes == 4 * profiles[0].edges[0].bytes


def test_the_model_is_left_as_it_was():
    model = Block().eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    describe(model, X, training=True)
    assert not model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def devices(*names):
    return Cluster.model_validate(
        {"devices": [{"name": name, "type": "t", "memory_bytes": 1} for name in names]}
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize(
    ("names", "options", "there"),
    [
        (("cuda:0", "cuda:1"), {}, True),
        (("cpu:0",), {}, False),
        (("cuda:0",), {"devices": 1}, False),
        (("cuda:0",), {"memory_bytes": 2**30}, False),
        (("cuda:0",), {"profile_on_server": False}, False),
        (("cpu:0",), {"profile_on_server": True}, True),
    ],
)
def test_unless_told_it_is_measured_there_when_only_there_are_gpus(
    monkeypatch, names, options, there
):
    chosen = []

    def note(where):
        def measure(*args, **kwargs):
            chosen.append(where)
            raise KeyboardInterrupt

        return measure

    monkeypatch.setattr(Client, "cluster", lambda self: devices(*names))
    monkeypatch.setattr(module, "measure_there", note("there"))
    monkeypatch.setattr(module, "_measure", note("here"))
    with pytest.raises(KeyboardInterrupt):
        suggest(Block(), X, server="http://127.0.0.1:9", progress=False, **options)
    assert chosen == ["there" if there else "here"]


def test_a_server_that_cannot_measure_leaves_it_to_this_machine(monkeypatch):
    def cannot(self):
        raise ServerError("torch is not installed here", 501)

    monkeypatch.setattr(Client, "cluster", cannot)
    assert not module.measures_there(None, "http://127.0.0.1:9", None, None)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"profile_on_server": True}, "no server is given"),
        ({"profile_on_server": True, "server": "http://x", "memory_bytes": 1}, "no memory_bytes"),
        (
            {"profile_on_server": True, "server": "http://x", "devices": ["cuda:0"]},
            "give their number alone",
        ),
        (
            {"profile_on_server": True, "server": "http://x", "optimizer": torch.optim.SGD},
            "measures the optimizers",
        ),
        (
            {"profile_on_server": True, "server": "http://x", "optimizer": "nonsense"},
            "measures the optimizers",
        ),
        (
            {"profile_on_server": True, "server": "http://x", "loss_fn": torch.sum, "target": X},
            "runs no functions",
        ),
        (
            {"profile_on_server": True, "server": "http://x", "disk_folder": "/tmp"},
            "does not measure its disk",
        ),
    ],
)
def test_what_cannot_be_measured_there_is_said(options, said):
    with pytest.raises(InputError, match=said):
        suggest(Block(), X, progress=False, **options)


def test_a_graph_that_the_service_forgot_when_it_was_killed_is_sent_again():
    profile = Profile.model_validate({"layers": [{"name": "a", "forward_ms": {"t": 1.0}}]})
    running = httpx.Response(202, json={"id": "k", "status": "running", "elapsed_s": 1.0})
    replies = [running, httpx.Response(404, json={"detail": "no such profile"}), running, profile]
    asked = []

    def answer(request):
        asked.append(request.method)
        reply = replies[len(asked) - 1]
        return httpx.Response(200, content=reply.to_json()) if isinstance(reply, Profile) else reply

    with Client("http://x", transport=httpx.MockTransport(answer)) as client:
        assert client.profile(ProfileRequest(graph=describe(Block(), X)[0])) == profile
    assert asked == ["POST", "GET", "POST", "GET"]


def test_a_profile_that_takes_its_time_is_asked_for_until_it_is_there():
    asked = []
    profile = Profile.model_validate({"layers": [{"name": "a", "forward_ms": {"t": 1.0}}]})

    def answer(request):
        asked.append((request.method, request.url.path))
        if len(asked) < 3:
            return httpx.Response(202, json={"id": "k", "status": "running", "elapsed_s": 1.0})
        return httpx.Response(200, content=profile.to_json())

    request = ProfileRequest(graph=describe(Block(), X)[0])
    with Client("http://x", transport=httpx.MockTransport(answer)) as client:
        assert client.profile(request) == profile
        asked.clear()
        with pytest.raises(TimeoutExceeded, match="profile k is running"):
            client.profile(request, wait=0)
    assert asked[0] == ("POST", "/v1/profiles")
