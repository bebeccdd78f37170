from __future__ import annotations

import json
from types import SimpleNamespace

import httpx
import pytest
import torch
from torch import nn

import placer
from placer.errors import (
    BatchError,
    CaptureError,
    InfeasibleError,
    InputError,
    SolveLimitError,
    UnreachableError,
)
from placer.profiler.links import disk_rate
from placer.schema import (
    Infeasibility,
    Placement,
    PlacementRequest,
    Profile,
    ShardedStep,
    SuggestOptions,
)
from placer_client import suggest as module
from placer_client.client import Client
from placer_client.suggest import suggest

GIB = 2**30


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 4)

    def forward(self, x, scale=1.0):
        return self.second(torch.relu(self.first(x))) * scale


class Carrying(Block):
    example_input_array = torch.ones(2, 8)


class CarryingLikeTransformers(Block):
    @property
    def dummy_inputs(self):
        return {"x": torch.ones(2, 8)}


class CarryingBroken(Block):
    @property
    def dummy_inputs(self):
        raise NotImplementedError


@pytest.fixture(autouse=True)
def no_server(monkeypatch):
    monkeypatch.delenv("PLACER_URL", raising=False)


@pytest.fixture
def profile():
    return Profile.model_validate(
        {
            "model": "Two",
            "layers": [
                {"name": "a", "forward_ms": {"cpu": 1.0}, "param_bytes": GIB},
                {"name": "b", "forward_ms": {"cpu": 1.0}, "param_bytes": GIB},
            ],
            "edges": [{"source": "a", "targets": ["b"], "bytes": 1000}],
            "cluster": {
                "devices": [
                    {"name": f"cpu:{i}", "type": "cpu", "memory_bytes": 10 * GIB} for i in range(2)
                ],
                "links": [
                    {"source": "cpu:0", "target": "cpu:1", "bandwidth_bytes_per_s": 1e9},
                    {"source": "cpu:1", "target": "cpu:0", "bandwidth_bytes_per_s": 1e9},
                ],
            },
        }
    )


def names(placement):
    return set(placement.layer_devices)


@pytest.mark.parametrize(
    "inputs", [torch.ones(2, 8), (torch.ones(2, 8), 2.0), {"x": torch.ones(2, 8), "scale": 2.0}]
)
def test_inputs_are_a_tensor_a_tuple_of_arguments_or_a_dict_of_keywords(inputs):
    placement = suggest(Block(), inputs, devices=["cpu:0"], granularity="submodule")
    assert names(placement) == {"first", "second"}
    assert set(placement.layer_devices.values()) == {"cpu:0"}


class TakesADict(Block):
    def forward(self, batch):
        return super().forward(batch["images"])


def test_a_dict_that_the_model_takes_itself_is_given_in_a_tuple_which_the_error_says():
    batch = {"images": torch.ones(2, 8)}
    assert (
        suggest(TakesADict(), (batch,), devices=["cpu:0"], cache=False, progress=False).status
        == "optimal"
    )
    with pytest.raises(
        CaptureError, match=r"keyword argument 'images'; a dict gives .* give it as \(inputs,\)"
    ):
        suggest(TakesADict(), batch, devices=["cpu:0"], cache=False, progress=False)


@pytest.mark.parametrize(
    ("inputs", "hint"),
    [
        ([torch.ones(2, 8)], "; give a tuple, not a list, of positional arguments$"),
        ((2, 8), r"; give a tensor, not a shape, such as torch.randn\(2, 8\)$"),
        (torch.Size([2, 8]), r"; give a tensor, not a shape, such as torch.randn\(2, 8\)$"),
        (
            torch.ones(2, 8).numpy(),
            r"; give tensors, not numpy arrays: convert these by torch.as_tensor\(x\)$",
        ),
        ((), r"; give one input for each argument of forward: several in a tuple \(x, y\), "),
        ((torch.ones(2, 8),) * 5, "; give one input for each argument of forward: .* in a dict$"),
    ],
)
def test_wrong_forms_and_numbers_of_inputs_are_told_what_to_give_instead(inputs, hint):
    with pytest.raises(CaptureError, match=f"the model fails on the example inputs: .*{hint}"):
        suggest(Block(), inputs, devices=["cpu:0"], cache=False, progress=False)


@pytest.mark.parametrize("model", [Carrying, CarryingLikeTransformers])
def test_without_inputs_those_that_the_model_carries_are_used(model):
    assert names(suggest(model(), devices=["cpu:0"], granularity="submodule")) == {
        "first",
        "second",
    }


@pytest.mark.parametrize("model", [Block, CarryingBroken])
def test_a_model_that_carries_no_inputs_is_an_input_error_that_says_what_to_pass(model):
    with pytest.raises(InputError, match=r"suggest\(model, x\)"):
        suggest(model())


def test_what_is_no_module_is_an_input_error():
    with pytest.raises(InputError, match="SimpleNamespace"):
        suggest(SimpleNamespace(), torch.ones(1))
    with pytest.raises(InputError, match=r"give an nn\.Module, or a profile"):
        suggest()


def test_it_is_the_public_suggest():
    assert placer.suggest is suggest


def test_the_loss_is_in_what_is_predicted():
    given = {
        "devices": ["cpu:0"],
        "granularity": "submodule",
        "chunks": 2,
        "schedule": "fill-drain",
    }
    given["constraints"] = placer.Constraints(
        contiguous=False
    )  # else a pass has room for it where the last layer worked
    alone = suggest(Block(), torch.ones(64, 8), **given)
    cross_entropy, target = nn.functional.cross_entropy, torch.zeros(64, dtype=torch.long)
    both = suggest(Block(), torch.ones(64, 8), loss_fn=cross_entropy, target=target, **given)
    log_softmax = 4 * 64 * 4  # of the micro-batch that waits
    assert both.devices[0].memory.total_bytes >= alone.devices[0].memory.total_bytes + log_softmax


def test_a_loss_beside_a_profile_is_refused(profile):
    with pytest.raises(InputError, match="loss_fn says how to measure, but a profile is given"):
        suggest(profile, loss_fn=nn.functional.cross_entropy, target=torch.zeros(2))


def test_a_given_profile_is_placed_without_measuring(profile):
    placement = suggest(profile)
    assert placement.status == "optimal"
    # One layer on each device: a bottleneck of 1 ms and a transfer, against 2 ms on one.
    assert len(set(placement.layer_devices.values())) == 2


def test_the_arguments_reach_the_solver(profile):
    rules = placer.Constraints(pinned={"a": "cpu:1"}, max_devices=1)
    placement = suggest(
        profile, constraints=rules, objective="latency", chunks=3, schedule="fill-drain"
    )
    assert placement.layer_devices == {"a": "cpu:1", "b": "cpu:1"}
    assert (placement.objective, placement.chunks, placement.schedule) == (
        "latency",
        3,
        "fill-drain",
    )


def test_a_step_takes_the_micro_batch_and_the_schedule_that_are_best(profile):
    """Two samples take as long as one: a batch of 8 goes in 4 micro-batches of 2."""
    larger = profile.model_copy(update={"batch_size": 2})
    placement = suggest([larger, profile], objective="step", batch_size=8)
    assert (placement.batch_size, placement.chunks) == (2, 4)


def test_a_step_is_one_of_many_in_training_and_alone_in_inference(profile):
    layers = [
        layer.model_copy(update={"backward_ms": layer.forward_ms}) for layer in profile.layers
    ]
    trained = profile.model_copy(update={"training": True, "layers": tuple(layers)})

    def steps(profile, **asked):
        return suggest(profile, objective="step", chunks=4, **asked).step.kind

    assert (steps(trained), steps(trained, training=False), steps(profile)) == (
        "steady-state",
        "isolated",
        "isolated",
    )
    assert (steps(trained, step_kind="isolated"), steps(profile, step_kind="steady-state")) == (
        "isolated",
        "steady-state",
    )


def test_micro_batches_are_measured_at_the_sizes_that_are_asked_for():
    placement = suggest(
        Block(),
        torch.ones(4, 8),
        devices=["cpu:0", "cpu:1"],
        objective="step",
        batch_size=8,
        batch_sizes=[2, 4],
    )
    choices = placement.step.choices
    assert {choice.batch_size // choice.replicas for choice in choices} == {2, 4}
    assert {choice.replicas for choice in choices} == {1, 2}


@pytest.mark.parametrize("options", [{"disk_bytes": "1MiB"}, {}])
def test_the_usual_disk_is_measured_only_if_weights_may_rest_there(options, tmp_path, monkeypatch):
    monkeypatch.setenv("PLACER_DISK", str(tmp_path / "weights"))
    monkeypatch.setattr(disk_rate, "SIZES", (2**12, 2**14))
    asked = SuggestOptions(objective="latency", training=False, cache=False, **options)
    request = module.question(Block(), torch.ones(4, 8), asked, devices=["cpu:0"], progress=False)
    (device,) = request.devices
    assert (device.from_disk is not None) == (tmp_path / "weights").is_dir() == bool(options)


def test_a_step_of_a_model_that_cannot_be_replicated_has_no_replicas():
    class Lookup(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.block = nn.Embedding(4, 8, max_norm=1.0), Block()

        def forward(self, words):
            return self.block(self.table(words))

    placement = suggest(
        Lookup(),
        torch.ones(4, dtype=torch.long),
        devices=["cpu:0", "cpu:1"],
        objective="step",
        batch_size=8,
    )
    assert {choice.replicas for choice in placement.step.choices} == {1}


def test_replicas_are_left_out_of_a_step_on_request():
    placement = suggest(
        Block(),
        torch.ones(4, 8),
        devices=["cpu:0", "cpu:1"],
        objective="step",
        batch_size=8,
        replicas="never",
    )
    assert {choice.replicas for choice in placement.step.choices} == {1}


def test_sizes_to_measure_and_a_profile_together_are_refused(profile):
    with pytest.raises(InputError, match="batch_sizes says how to measure"):
        suggest(profile, batch_sizes=[2])


def test_a_model_that_fits_nowhere_is_an_infeasible_error_with_the_reason(profile):
    small = [
        device.model_copy(update={"memory_bytes": GIB // 2}) for device in profile.cluster.devices
    ]
    cluster = profile.cluster.model_copy(update={"devices": tuple(small)})
    with pytest.raises(InfeasibleError, match="'a'"):
        suggest(profile.model_copy(update={"cluster": cluster}))


def test_the_error_names_a_sharded_step_that_fits(profile, monkeypatch):
    sharded = ShardedStep(
        step_ms=12.5, compute_ms=10.0, memory_bytes=GIB, batch_size=2, chunks=4, modules=("a.0",)
    )
    none = Placement(
        status="infeasible",
        objective="step",
        infeasible=Infeasibility(reason="too large"),
        sharded=sharded,
    )
    monkeypatch.setattr("placer.solver.solve.solve", lambda request: none)
    with pytest.raises(InfeasibleError, match=r"FSDP2 is predicted to fit: 12\.50 ms a step by"):
        suggest(profile)


def test_no_placement_in_time_is_a_solve_limit_error(profile, monkeypatch):
    unknown = Placement(status="unknown", objective="throughput")
    monkeypatch.setattr("placer.solver.solve.solve", lambda request: unknown)
    with pytest.raises(SolveLimitError, match="time_limit_s"):
        suggest(profile, time_limit_s=0.5)


@pytest.mark.parametrize(
    "wrong", [{"chunks": 0}, {"objective": "fun"}, {"time_limit_s": float("nan")}]
)
def test_an_argument_that_cannot_be_used_is_an_input_error_that_names_it(profile, wrong):
    (name,) = wrong
    with pytest.raises(InputError, match=name):
        suggest(profile, **wrong)


@pytest.mark.parametrize(
    "wrong", [{"chunks": 0}, {"objective": "fun"}, {"time_limit_s": 0}, {"schedule": "fast"}]
)
def test_an_argument_that_cannot_be_used_is_told_before_the_model_is_measured(monkeypatch, wrong):
    # Measuring takes minutes where layers are many; the word was looked at afterwards.
    monkeypatch.setattr(module, "_measure", lambda *_, **__: pytest.fail("it was measured first"))
    with pytest.raises(InputError, match=next(iter(wrong))):
        suggest(Block(), torch.ones(2, 8), **wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"profile": None}, r"pass a profile, .* as the first argument: suggest\(profile\)"),
        ({"profiles": []}, "as the first argument"),
        ({"example_input": 1}, "suggest has no argument 'example_input'; .* 'example_inputs'"),
        ({"chunk": 4}, "suggest has no argument 'chunk'; did you mean 'chunks'"),
        ({"chunk": 4, "options": placer.SolveOptions()}, "did you mean 'chunks'"),
    ],
)
def test_an_argument_that_does_not_exist_is_refused_with_its_name(profile, wrong, message):
    with pytest.raises(InputError, match=message):
        suggest(profile, **wrong)


class SequenceFirst(nn.Module):
    """A recurrent network over (length, batch, features)."""

    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


def test_samples_that_lie_elsewhere_are_refused_where_their_number_counts(monkeypatch):
    """Steps of a sequence were taken for samples without a word."""
    monkeypatch.setattr(module, "_measure", lambda *_, **__: pytest.fail("it was measured first"))
    model, x = SequenceFirst(), torch.randn(6, 4, 8)
    before = torch.get_rng_state()
    with pytest.raises(BatchError, match=r"BatchOptions\(inputs=1\)"):
        suggest(model, x, objective="step", devices=["cpu:0", "cpu:1"])
    assert torch.equal(torch.get_rng_state(), before) and model.training


@pytest.mark.parametrize(
    "asked",
    [
        {"objective": "step", "batch_options": placer.BatchOptions(inputs=1)},
        {"objective": "step", "batch_options": placer.BatchOptions(verify=False)},
        {"chunks": 2},  # a micro-batch is measured whole
    ],
)
def test_samples_that_are_declared_or_not_counted_are_not_refused(asked):
    model, x = SequenceFirst(), torch.randn(6, 4, 8)
    placed = suggest(model, x, devices=["cpu:0"], repeats=1, cache=False, **asked)
    declared = "batch_options" in asked and asked["batch_options"].inputs == 1
    assert placed.batch_size == (4 if declared else 6)


def test_an_input_that_happens_to_have_the_batchs_size_is_not_refused():
    """The table has four rows as the batch has four samples, and all samples read all of it."""

    class Lookup(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 4)

        def forward(self, x, table):
            return self.linear(x) @ table

    inputs = (torch.randn(4, 8), torch.randn(4, 3))
    placed = suggest(Lookup(), inputs, devices=["cpu:0"], objective="step", repeats=1, cache=False)
    assert placed.batch_size == 4


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"objective": "step", "batch_size": 17, "batch_sizes": (8, 4)},
            "batch_size: 17 samples cannot be divided into micro-batches of 4 or 8",
        ),
        (
            {"objective": "step", "batch_size": 17},
            "batch_size: 17 samples cannot be divided into micro-batches of 2;",
        ),
        (
            {"objective": "step", "batch_size": 8, "batch_sizes": (0,)},
            r"batch_sizes=\(0,\): give different whole",
        ),
        ({"batch_sizes": (4, 8)}, "profiles: only objective 'step' chooses it"),
        (
            {"constraints": placer.Constraints(min_devices=5)},
            "min_devices is 5, but the cluster has 2 devices",
        ),
        (
            {"constraints": {"pined": {}}},
            "SuggestOptions.constraints.pined: there is no such field; did you mean 'pinned'?",
        ),
        ({"constraints": ["pinned"]}, "SuggestOptions.constraints: should be a valid dictionary"),
        (
            {"constraints": {"pinned": {"first": "cpu:9"}}},
            "there is no device 'cpu:9'; did you mean 'cpu:1'?",
        ),
        ({"server": "localhost:80"}, "server 'localhost:80' is not the URL of a service"),
        ({"server": "http://host:99999"}, "server 'http://host:99999' is not the URL of a service"),
        (
            {"objective": "devices"},
            "bottleneck_ms is missing: objective 'devices' needs the longest time of a device",
        ),
        ({"bottleneck_ms": 5.0}, "bottleneck_ms is 5, which only objective 'devices' uses"),
    ],
)
def test_what_no_profile_could_answer_is_told_before_the_model_is_measured(
    monkeypatch, wrong, message
):
    # These were looked at only in the question that is made of the profile, after minutes of
    # measuring.
    monkeypatch.setattr(module, "_measure", lambda *_, **__: pytest.fail("it was measured first"))
    with pytest.raises(InputError, match=message):
        suggest(Block(), torch.ones(2, 8), devices=["cpu:0", "cpu:1"], **wrong)


def test_constraints_may_be_given_as_what_their_json_holds():
    rules = {
        "pinned": {"first": "cpu:1"},
        "forbidden": {"*": ["cpu:0"]},
        "min_devices": 1,
        "colocated": [["second"]],
    }
    placed = suggest(
        Block(), torch.ones(2, 8), devices=2, constraints=rules, granularity="submodule"
    )
    assert placed.layer_devices == {"first": "cpu:1", "second": "cpu:1"}


@pytest.mark.parametrize("given", ["profile.json", {"layers": []}, ["profile.json"]])
def test_what_is_no_profile_is_refused_with_how_to_make_one_of_json(given):
    with pytest.raises(
        InputError,
        match=r"model is an? \w+; give an nn.Module, or a Profile, "
        r"which Profile.model_validate_json",
    ):
        suggest(given)


def test_a_profile_and_devices_together_are_refused(profile):
    with pytest.raises(InputError, match="leave devices"):
        suggest(profile, devices=2)


@pytest.fixture
def asked(monkeypatch):
    """The requests that a stand-in of the service got."""
    got = []

    def reply(request: httpx.Request) -> httpx.Response:
        got.append((request.url.host, PlacementRequest.model_validate_json(request.content)))
        placed = {
            "status": "optimal",
            "objective": "throughput",
            "layer_devices": {"a": "cpu:0", "b": "cpu:0"},
        }
        return httpx.Response(200, content=json.dumps(placed))

    monkeypatch.setattr(
        module, "Client", lambda server: Client(server, transport=httpx.MockTransport(reply))
    )
    return got


def test_a_server_is_asked_when_given(profile, asked):
    assert suggest(profile, server="http://one").layer_devices["b"] == "cpu:0"
    assert [(host, request.profile) for host, request in asked] == [("one", profile)]


def test_the_environments_server_is_asked_unless_another_is_given(profile, asked, monkeypatch):
    monkeypatch.setenv("PLACER_URL", "http://environment")
    suggest(profile)
    suggest(profile, server="http://argument")
    assert [host for host, _ in asked] == ["environment", "argument"]


def test_a_model_is_profiled_here_and_placed_by_a_real_service():
    from placer_server.app import background
    from placer_server.settings import Settings

    with background(Settings(port=0, database=":memory:", log_level="warning")) as url:
        there = suggest(
            Block(), torch.ones(2, 8), devices=["cpu:0"], granularity="submodule", server=url
        )
    assert there.layer_devices == {"first": "cpu:0", "second": "cpu:0"}
    assert there.status == "optimal"


def test_a_server_that_cannot_be_reached_is_an_error_and_not_solved_here(profile, monkeypatch):
    def refuse(request):
        raise httpx.ConnectError("refused")

    monkeypatch.setattr(
        module,
        "Client",
        lambda server: Client(server, retries=0, transport=httpx.MockTransport(refuse)),
    )
    with pytest.raises(UnreachableError, match="http://one"):
        suggest(profile, server="http://one")


@pytest.fixture
def passes(profile, monkeypatch):
    """What is measured of a generation is given, and what was asked for is kept."""
    seen = {}
    rows = tuple(layer.model_copy(update={"buffer_bytes": 8}) for layer in profile.layers)
    token = profile.model_copy(update={"layers": rows, "cluster": None})

    def measured(model, prompt, asked, attention, capacity, devices, *, options, **how):
        seen.update(how, prompt=prompt, asked=asked, capacity=capacity, options=options)
        return profile, token

    monkeypatch.setattr("placer.profiler.generation.profile_generation", measured)
    monkeypatch.setattr("placer.estimator.kv_cache.keys_and_values", lambda *given: [])
    return SimpleNamespace(seen=seen, prompt=profile, token=token)


class LikeTransformers(Block):
    config = SimpleNamespace(get_text_config=lambda: None)


TEXT = placer.GenerationOptions(prompt_tokens=512, new_tokens=64, sequences_in_flight=2)


def test_both_passes_of_a_generation_are_measured_in_blocks_with_room_for_the_text(passes):
    placement = suggest(LikeTransformers(), devices=1, objective="generation", generation=TEXT)
    assert placement.objective == "generation" and not placement.training
    assert placement.generation.new_tokens == 64
    assert passes.seen["capacity"] == 640
    assert passes.seen["options"].granularity == "blocks"
    assert passes.seen["prompt"]["input_ids"].shape == (1, 512)


def test_the_granularity_of_a_generation_is_the_callers(passes):
    suggest(LikeTransformers(), devices=1, objective="generation", generation=TEXT, granularity=2)
    assert passes.seen["options"].granularity == 2


def test_two_profiles_of_a_generation_are_placed_without_measuring(passes):
    placement = suggest([passes.prompt, passes.token], objective="generation", generation=TEXT)
    assert sum(load.memory.cache_bytes for load in placement.devices) == 2 * 2 * 8


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, "generation is missing"),
        ({"generation": {"prompt_tokens": 9, "new_tokens": 0}}, "new_tokens: should be greater"),
        ({"generation": TEXT, "training": True}, "objective 'generation' places inference"),
        ({"generation": TEXT, "batch_sizes": (1, 2)}, "leave batch_sizes out"),
        ({"generation": TEXT, "objective": "latency"}, "only objective 'generation' uses it"),
        (
            {"generation": TEXT, "server": "http://127.0.0.1:9", "profile_on_server": True},
            "measure the model here",
        ),
    ],
)
def test_what_no_generation_has_is_told_before_the_model_is_measured(passes, wrong, message):
    model = CarryingLikeTransformers() if "objective" in wrong else LikeTransformers()
    with pytest.raises(InputError, match=message):
        suggest(model, **{"devices": 1, "objective": "generation"} | wrong)
    assert not passes.seen


def test_a_step_without_a_batch_is_warned_of_at_the_line_of_the_caller(profile):
    # It was silent: a batch of one micro-batch, which no pipeline makes faster.
    with pytest.warns(UserWarning, match="neither batch_size nor chunks is given") as warned:
        suggest(profile, objective="step")
        suggest(Block(), torch.ones(4, 8), devices=["cpu:0"], objective="step", repeats=1)
    assert [warning.filename for warning in warned] == [__file__] * 2
    assert ["a batch of 4 samples" in str(warning.message) for warning in warned] == [False, True]


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (lambda flow: flow, r"^model is a DataFlow, .*; give that model, flow\.module"),
        (lambda flow: nn.Sequential(nn.ReLU(), flow), "^module '1' of the model is a DataFlow"),
    ],
)
def test_a_flow_is_refused_as_a_model_and_still_runs(wrap, message):
    # It was a TypeError of LatestShapes, and the flow returned fake tensors from then on.
    model, x = Block(), torch.ones(4, 8)
    expected = model(x)
    flow = placer.DataFlow(model, device_ids=["cpu:0", "cpu:1"])
    flow.layer_gpus.update(first=0, second=1)
    flow.update_flow()
    with pytest.raises(InputError, match=message):
        suggest(wrap(flow), x, devices=2, repeats=1, cache=False)
    assert torch.equal(flow(x), expected)
