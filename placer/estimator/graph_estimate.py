"""The estimate of a captured graph, as a service answers it."""

from __future__ import annotations

from placer.errors import InputError
from placer.estimator.device_sizes import cluster_of, sized_cluster
from placer.estimator.fake_profile import estimated_graph_profile
from placer.estimator.memory_search import Asked, Estimated, SmallerBatches, estimated
from placer.schema import Cluster, Estimate, EstimateRequest, Profile
from placer.schema.graph import Graph
from placer.utils.units import bytes_text


def estimated_request(request: EstimateRequest) -> Estimate:
    """Return the estimate of a graph's memory on the devices of a request.

    Raises:
        InputError: the graph has a forbidden operator, the devices cannot be used, a smaller graph
            is of another model, or a layer with a cache does not exist.
        ProfilingError: a layer cannot run on fake tensors.
    """
    graph = request.graph
    names = {layer.name for layer in graph.layers}
    unknown = next((name for name in request.cache_bytes if name not in names), None)
    if unknown is not None:
        raise InputError(f"cache_bytes names layer {unknown!r}, which the graph does not have")
    if request.cache_bytes and graph.training:
        raise InputError("cache_bytes is given, but training has no cache; leave it out")
    cluster = None
    if request.devices is not None:
        cluster = cluster_of(request.devices, request.reserve_bytes)
    # A profile needs a device, but its memory changes nothing in the profile.
    devices = cluster or sized_cluster([1], 0)

    def profile_of(one: Graph) -> Profile:
        return estimated_graph_profile(one, devices, request.optimizer)

    asked = Asked(
        chunks=request.chunks,
        schedule=request.schedule,
        recompute=request.recompute,
        cache_bytes=request.cache_bytes,
        reserve_bytes=request.reserve_bytes,
        time_limit_s=request.time_limit_s,
    )
    smaller = _smaller(request)

    def resized(size: int) -> Estimated:
        cache = {
            name: held * size // graph.batch_size for name, held in request.cache_bytes.items()
        }
        return profile_of(smaller[size]), cache

    batches = SmallerBatches(sorted(smaller), resized) if smaller else None
    found = estimated(profile_of(graph), cluster, asked, batches)
    if request.reserve_bytes and not isinstance(request.devices, Cluster):
        reserve = bytes_text(request.reserve_bytes)
        note = f"of each device, {reserve} are reserved for the CUDA context and libraries"
        found = found.model_copy(update={"notes": (note, *found.notes)})
    return found


def _smaller(request: EstimateRequest) -> dict[int, Graph]:
    """Return the graphs of smaller micro-batches by their number of samples.

    Raises:
        InputError: a graph has other layers, or its micro-batches do not divide the first graph's.
    """
    names = [layer.name for layer in request.graph.layers]
    size = request.graph.batch_size
    for graph in request.smaller:
        if [layer.name for layer in graph.layers] != names:
            raise InputError(
                f"smaller: the graph of {graph.batch_size} samples has other layers than the graph"
                f" of {size}; capture both with the same granularity"
            )
        if graph.batch_size >= size or size % graph.batch_size:
            raise InputError(
                f"smaller: {graph.batch_size} samples do not divide a micro-batch of {size}; give"
                " graphs of smaller divisors"
            )
    return {graph.batch_size: graph for graph in request.smaller}
