"""Reading of older schema versions, against files that version 1 wrote."""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError
from small_requests import examples

import placer.schema
from placer.errors import InputError
from placer.schema import (
    SCHEMA_VERSION,
    Batch,
    BatchAnswers,
    Cluster,
    Comparison,
    Constraints,
    Device,
    Edge,
    Evaluation,
    Improvement,
    Infeasibility,
    Layer,
    Limits,
    Link,
    Placement,
    PlacementRequest,
    Profile,
    Rate,
    Refinement,
    SingleDevice,
    Step,
    TieBreaks,
    Timeline,
    versions,
)
from placer.schema.base import Wire, read_json
from placer.schema.graph import ProfileRequest
from placer.schema.versions import RENAMED, VERSIONS

FILES = Path(__file__).parent / "version_1"
KINDS: dict[str, type[Wire]] = {
    "batch": Batch,
    "batch_answers": BatchAnswers,
    "cluster": Cluster,
    "comparison": Comparison,
    "evaluation": Evaluation,
    "placement": Placement,
    "placement_alone": Placement,
    "placement_infeasible": Placement,
    "placement_throughput": Placement,
    "profile": Profile,
    "profile_as_saved": Profile,
    "profile_request": ProfileRequest,
    "refinement": Refinement,
    "refinement_settled": Refinement,
    "request": PlacementRequest,
    "timeline": Timeline,
}
NEW_WORDS = {
    "alone": "isolated",
    "in-a-row": "steady-state",
    "work": "compute",
    "settled": "converged",
    "rounds": "max-rounds",
}
"""All texts that version 2 renamed."""


def old(name: str) -> Any:
    """Return the decoded content of a version-1 file."""
    return json.loads((FILES / f"{name}.json").read_text())


def leaves(content: Any) -> Iterator[Any]:
    """Yield the values of decoded JSON in order, without their names and without versions."""
    if isinstance(content, dict):
        for name, inner in content.items():
            yield from leaves(inner if name != "schema_version" else [])
    elif isinstance(content, list):
        for inner in content:
            yield from leaves(inner)
    else:
        yield content


def types() -> dict[str, type[BaseModel]]:
    """Return every wire type by its name."""
    modules = [
        importlib.import_module(f"placer.schema.{module.name}")
        for module in pkgutil.iter_modules(placer.schema.__path__)
    ]
    return {
        name: kind
        for module in modules
        for name, kind in vars(module).items()
        if isinstance(kind, type) and issubclass(kind, Wire)
    }


def downgraded(value: Any) -> Any:
    """Return an object as version 1 wrote it: the inverse of the table."""
    if isinstance(value, tuple):
        return [downgraded(item) for item in value]
    if isinstance(value, dict):
        return {name: downgraded(item) for name, item in value.items()}
    if not isinstance(value, BaseModel):
        return value
    content = {name: downgraded(getattr(value, name)) for name in type(value).model_fields}
    for kind in type(value).__mro__:
        if (table := RENAMED["1"].get(kind.__name__)) is None:
            continue
        for name, values in table.values.items():
            word = {new: before for before, new in values.items()}.get(content[name])
            content[name] = word or content[name]
        for before, new in table.fields.items():
            content[before] = content.pop(new)
    if "schema_version" in content:
        content["schema_version"] = "1"
    return content


def test_every_file_has_a_type():
    assert {path.stem for path in FILES.glob("*.json")} == set(KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_a_file_of_version_1_is_read_as_the_current_version(name):
    text, kind = (FILES / f"{name}.json").read_text(), KINDS[name]
    found = kind.model_validate_json(text)
    assert kind.model_validate(old(name)) == found
    assert read_json(kind, text.encode(), strict=True) == found
    assert kind.model_validate_json(found.model_dump_json()) == found
    assert getattr(found, "schema_version", SCHEMA_VERSION) == SCHEMA_VERSION


@pytest.mark.parametrize("name", sorted(set(KINDS) - {"batch", "profile_as_saved"}))
def test_every_value_of_a_file_of_version_1_is_kept(name):
    found = KINDS[name].model_validate(old(name))
    kept = list(leaves(found.model_dump(mode="json", exclude_unset=True)))
    given = [NEW_WORDS.get(one, one) if isinstance(one, str) else one for one in leaves(old(name))]
    assert kept == given


def test_a_placement_of_version_1_has_its_values_under_the_new_names():
    before, found = old("placement"), Placement.model_validate(old("placement"))
    assert found.step is not None and found.limits is not None and found.tie_breaks is not None
    assert (found.step.kind, before["step"]["steps"]) == ("steady-state", "in-a-row")
    assert found.step.isolated_ms == before["step"]["alone_ms"] > 0
    assert found.step.steady_state_ms == before["step"]["in_a_row_ms"] > 0
    assert (found.limits.kind, before["limits"]["kind"]) == ("compute", "work")
    assert found.limits.detail == before["limits"]["what"]
    assert [one.change for one in found.limits.improvements] == [
        one["change"] for one in before["limits"]["helps"]
    ]
    assert found.tie_breaks.imbalance_ms == before["ties"]["spread_ms"]
    assert found.optimizer_workspace_ratio == before["optimizer_step_share"] == 1.5
    assert found.links_through_host == (("cpu:0", "cpu:1"),)
    isolated = Placement.model_validate(old("placement_alone"))
    assert isolated.step is not None and isolated.step.kind == "isolated"
    infeasible = Placement.model_validate(old("placement_infeasible")).infeasible
    assert infeasible is not None and infeasible.minimal
    assert infeasible.missing_bytes == old("placement_infeasible")["infeasible"]["short_bytes"] > 0


def test_a_profile_of_version_1_has_its_values_under_the_new_names():
    before, found = old("profile"), Profile.model_validate(old("profile"))
    layer, then = found.layers[1], before["layers"][1]
    assert layer.weight_grad_ms == then["weights_ms"] != {}
    assert layer.recorded_workspace_bytes == then["pass_workspace_bytes"] > 0
    assert layer.input_grad_workspace_bytes == then["input_workspace_bytes"] > 0
    assert layer.weight_grad_workspace_bytes == then["weights_workspace_bytes"] > 0
    assert (found.edges[0].retained_bytes, found.edges[0].retained_until) == (2048, "second")
    assert found.cluster is not None and found.cluster.links[0].bidirectional is not None
    assert found.cluster.links[0].bidirectional_computing is not None
    assert found.optimizer_workspace_ratio == 1.5
    assert Profile.model_validate(old("profile_as_saved")) == found


def test_a_refinement_of_version_1_has_its_values_under_the_new_names():
    found = Refinement.model_validate(old("refinement"))
    assert found.stop_reason == "max-rounds"
    assert found.rounds[0].stages[0].weight_grad_ms == 0.5
    assert Refinement.model_validate(old("refinement_settled")).stop_reason == "converged"


def test_a_graph_of_version_1_trains_the_same_state():
    found = ProfileRequest.model_validate(old("profile_request"))
    assert all(state.requires_grad for state in found.graph.state)


@pytest.mark.parametrize("objective", ["profile", "request", "placement", "refinement"])
def test_a_file_of_version_1_is_read_without_its_version_too(objective):
    def without(content: Any) -> Any:
        if isinstance(content, list):
            return [without(item) for item in content]
        if not isinstance(content, dict):
            return content
        return {name: without(one) for name, one in content.items() if name != "schema_version"}

    kind = KINDS[objective]
    assert kind.model_validate(without(old(objective))) == kind.model_validate(old(objective))


def test_a_profile_of_version_1_in_a_request_of_version_2_is_read():
    request = {"schema_version": "2", "profile": old("profile"), "chunks": 3}
    found = PlacementRequest.model_validate(request)
    assert found.profile == Profile.model_validate(old("profile"))


def test_an_object_without_a_version_has_the_version_of_the_object_around_it():
    request = old("request")
    del request["profile"]["schema_version"]
    read = PlacementRequest.model_validate_json
    assert read(json.dumps(request)) == read(json.dumps(old("request")))
    with pytest.raises(InputError, match="short_bytes"):
        Placement.model_validate(old("placement_infeasible") | {"schema_version": "2"})


def test_names_of_users_are_no_names_of_fields():
    layers = [{"name": name, "forward_ms": {"steps": 1.0}} for name in ("ties", "helps")]
    devices = [{"name": "short_bytes", "type": "steps", "memory_bytes": 9}]
    found = PlacementRequest.model_validate(
        {
            "schema_version": "1",
            "profile": {"layers": layers, "versions": {"what": "alone"}},
            "cluster": {"devices": devices},
            "constraints": {"pinned": {"ties": "short_bytes"}},
            "objective": "step",
            "steps": "alone",
        }
    )
    assert found.constraints.pinned == {"ties": "short_bytes"}
    assert found.profile.versions == {"what": "alone"}
    assert found.profile.layers[0].forward_ms == {"steps": 1.0}
    assert found.step_kind == "isolated"


def test_an_old_name_beside_its_new_one_is_refused():
    with pytest.raises(InputError, match="steps: there is no such field"):
        PlacementRequest.model_validate(old("request") | {"step_kind": "isolated"})


def test_an_object_of_version_2_is_read_with_the_defaults_of_version_3():
    found = Placement(status="feasible", objective="latency", layer_devices={"a": "d"})
    before = found.model_dump(mode="json", exclude={"resting"}) | {"schema_version": "2"}
    assert Placement.model_validate(before) == found
    assert read_json(Placement, json.dumps(before), strict=True).schema_version == "3"


def test_a_fault_of_an_older_object_is_told_with_its_place():
    wrong = old("profile")
    wrong["layers"][1]["weights_ms"] = {"cpu": -1}
    with pytest.raises(InputError, match=r"Profile.layers.1.weight_grad_ms.cpu: .*, not -1"):
        Profile.model_validate(wrong)
    assert wrong["layers"][1]["weights_ms"] == {"cpu": -1}, "the caller's content is unchanged"


@pytest.mark.covering
@pytest.mark.parametrize("version", ["0", "4", "1.0", 1, None, [], {}])
@pytest.mark.parametrize("name", ["profile", "request", "placement", "refinement", "batch"])
def test_an_unknown_version_is_told_with_the_known_ones(name, version):
    content = json.dumps(old(name) | {"schema_version": version})
    with pytest.raises(
        InputError, match=r"reads versions '1', '2' and '3': upgrade Placer"
    ) as error:
        KINDS[name].model_validate_json(content)
    assert repr(version) in str(error.value)


def test_a_constructor_says_who_reads_an_older_version():
    with pytest.raises(InputError, match="'1' is an older version; model_validate"):
        Profile(**old("profile"))


def test_a_text_of_the_current_version_is_decoded_once(monkeypatch):
    text = Profile.model_validate(old("profile")).to_json()
    monkeypatch.setattr(versions, "_upgraded", lambda *_: pytest.fail("decoded again"))
    assert Profile.model_validate_json(text).schema_version == SCHEMA_VERSION
    read_json(Profile, text.encode(), strict=True)
    assert versions.stored_json(text.encode(), Profile) == text.encode()


def test_an_invalid_text_without_anything_older_is_not_decoded_again(monkeypatch):
    monkeypatch.setattr(versions, "from_json", lambda *_: pytest.fail("decoded again"))
    with pytest.raises(InputError, match=r"Profile\.layers: is missing"):
        Profile.model_validate_json('{"schema_version": "3", "model": "any"}')


@pytest.mark.parametrize(
    "text", ["", "{", "[" * 300, '{"layers": [', f'{{"batch_size": {"9" * 5000}}}', '"1"', "[]"]
)
def test_what_is_not_json_or_no_object_has_the_error_that_it_had(text):
    with pytest.raises(ValidationError):
        read_json(Profile, text)
    with pytest.raises(InputError):
        Profile.model_validate_json(text)


def test_what_a_store_holds_is_upgraded_wherever_its_version_is():
    placement = json.dumps(old("placement")).encode()
    assert json.loads(versions.stored_json(placement, Placement))["schema_version"] == "3"
    saved = (FILES / "profile_as_saved.json").read_bytes()
    assert json.loads(versions.stored_json(saved, Profile)) == json.loads(
        Profile.model_validate_json(saved).to_json()
    )
    # later versions of Placer may have written anything
    assert versions.stored_json(b"{}", Placement) == b"{}"
    assert versions.stored_json(b"\x01", Placement) == b"\x01"


def test_the_versions_are_consecutive_and_the_last_one_is_written():
    assert list(VERSIONS) == [str(number) for number in range(1, len(VERSIONS) + 1)]
    assert VERSIONS[-1] == SCHEMA_VERSION
    for kind in types().values():
        if "schema_version" in kind.model_fields:
            field = kind.model_fields["schema_version"]
            assert (get_args(field.annotation), field.default) == ((SCHEMA_VERSION,), VERSIONS[-1])


def test_the_table_names_types_and_fields_that_exist():
    known = types()
    for name, table in RENAMED["1"].items():
        fields = known[name].model_fields
        assert set(table.fields.values()) <= set(fields), name
        assert not set(table.fields) & set(fields), name
        for field, values in table.values.items():
            words = {word for part in _parts(fields[field].annotation) for word in get_args(part)}
            assert set(values.values()) <= words and not set(values) & words


def _parts(annotation: Any) -> Iterator[Any]:
    yield annotation
    for part in get_args(annotation):
        yield from _parts(part)


MS = st.sampled_from([0.0, 0.5, 3.0])
BYTES = st.sampled_from([0, 1, 2**20])
NAMES = ("a", "ties", "c")
RATES = st.none() | st.just(Rate(bandwidth_bytes_per_s=1e9))
STEP_KINDS = st.sampled_from(["isolated", "steady-state"])


@st.composite
def requests(draw: st.DrawFn) -> PlacementRequest:
    """Return a request with every renamed field, or its default."""
    layers = tuple(
        Layer(
            name=name,
            forward_ms={"t": draw(MS)},
            backward_ms={"t": draw(MS)},
            weight_grad_ms=draw(st.sampled_from([{}, {"t": 0.5}])),
            recorded_workspace_bytes=draw(BYTES),
            input_grad_workspace_bytes=draw(BYTES),
            weight_grad_workspace_bytes=draw(BYTES),
        )
        for name in NAMES
    )
    edge = Edge(
        source="a",
        targets=("ties", "c"),
        bytes=1,
        retained_bytes=draw(BYTES),
        retained_until=draw(st.sampled_from(["", "c"])),
    )
    devices = tuple(Device(name=name, type="t", memory_bytes=2**30) for name in ("d", "helps"))
    links = tuple(
        Link(
            source=source,
            target=target,
            bandwidth_bytes_per_s=1e9,
            bidirectional=draw(RATES),
            bidirectional_computing=draw(RATES),
        )
        for source, target in (("d", "helps"), ("helps", "d"))
    )
    cluster = Cluster(devices=devices, links=links)
    profile = Profile(
        layers=layers,
        edges=(edge,),
        training=True,
        cluster=draw(st.sampled_from([None, cluster])),
        optimizer_workspace_ratio=draw(MS),
        versions={"what": "alone"},
    )
    return PlacementRequest(
        profile=profile,
        profiles=draw(st.sampled_from([(), (profile.model_copy(update={"batch_size": 2}),)])),
        cluster=cluster,
        objective="step",
        step_kind=draw(STEP_KINDS),
        batch_size=4,
        constraints=Constraints(pinned={"ties": "helps"}),
    )


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """Return a placement with every renamed field, or its default."""
    improvement = Improvement(change="alone", objective_value=1.0, speedup=2.0)
    return Placement(
        status="feasible",
        objective="step",
        layer_devices={"ties": "helps"},
        optimizer_workspace_ratio=draw(MS),
        links_through_host=draw(st.sampled_from([(), (("d", "helps"),)])),
        single_device=draw(
            st.none()
            | st.builds(
                SingleDevice,
                device=st.just("d"),
                objective_value=MS,
                fits=st.booleans(),
                missing_bytes=BYTES,
            )
        ),
        infeasible=draw(
            st.none()
            | st.builds(
                Infeasibility,
                reason=st.just("alone"),
                missing_bytes=BYTES,
                minimal=st.booleans(),
            )
        ),
        tie_breaks=draw(
            st.none() | st.builds(TieBreaks, transfer_ms=MS, imbalance_ms=MS, proven=st.booleans())
        ),
        limits=draw(
            st.none()
            | st.builds(
                Limits,
                kind=st.sampled_from(["memory", "link", "layer", "compute"]),
                detail=st.just("work"),
                improvements=st.sampled_from([(), (improvement,)]),
            )
        ),
        step=draw(
            st.none()
            | st.builds(
                Step,
                batch_size=st.just(4),
                samples_per_s=st.none() | MS,
                bubble=st.just(0.5),
                kind=STEP_KINDS,
                isolated_ms=st.none() | MS,
                steady_state_ms=st.none() | MS,
            )
        ),
    )


@examples(400)
@given(st.one_of(requests(), placements()))
def test_any_object_that_version_1_would_have_written_is_read_again(found):
    before = downgraded(found)
    assert before["schema_version"] == "1" and before != found.model_dump(mode="json")
    assert type(found).model_validate(before) == found
    assert read_json(type(found), json.dumps(before), strict=True) == found


def test_programs_read_the_times_of_a_step_by_their_names_of_version_1() -> None:
    step = Step(batch_size=1, samples_per_s=None, bubble=0.0, isolated_ms=3.0, steady_state_ms=2.0)
    assert (step.alone_ms, step.in_a_row_ms) == (3.0, 2.0)
