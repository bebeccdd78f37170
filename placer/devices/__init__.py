"""The one place that knows CUDA from CPU: names, streams, events, graphs, memory figures, copies.

A CPU stand-in is ``cpu:0``, ``cpu:1``, ...: the same memory and cores as every other, a device by name alone, until
``placer.testing.logical_devices`` makes it behave like one.
"""

from placer.devices.chance import Repeated, keep_random_state
from placer.devices.clock import Clock
from placer.devices.device_time import lasting_ms, pause, queued_ms, replay_ms
from placer.devices.fitting import Rooms
from placer.devices.identity import boot_id, host_name, place, speed_facts
from placer.devices.lanes import Courier, Delivery, Lane, Mark, shared_lane
from placer.devices.lasting import LASTING_S, is_at_limit, lasting_share
from placer.devices.memory import (
    cache_bytes,
    context_bytes,
    counts_bytes,
    fragmented_bytes,
    library_bytes,
    memory_bytes,
    peak_bytes,
    release_cache,
)
from placer.devices.moving import (
    copy,
    fill,
    has_tangents,
    is_in_transform,
    is_transformed,
    location,
    move,
    same,
    staged,
    unwrapped,
    write,
)
from placer.devices.names import (
    CPU,
    DeviceLike,
    available,
    current,
    default_kind,
    parse,
    require,
    resolve,
    synchronise,
    type_name,
)
from placer.devices.parts import addresses, parts
from placer.devices.recording import (
    NotRecordable,
    fitting_rooms,
    memory_pool,
    record,
    recording,
    side_by_side,
    warm_libraries,
)
from placer.devices.routes import HOST, detour, detours, has_detour, set_detours, straight, take_detours
from placer.devices.stand_ins import Onlooker, Registry, answering, observed, registries, stand_ins, unobserved
from placer.devices.transfers import Shipment, copy_s, host_buffer

__all__ = [
    "CPU",
    "HOST",
    "LASTING_S",
    "Clock",
    "Courier",
    "Delivery",
    "DeviceLike",
    "Lane",
    "Mark",
    "NotRecordable",
    "Onlooker",
    "Registry",
    "Repeated",
    "Rooms",
    "Shipment",
    "addresses",
    "answering",
    "available",
    "boot_id",
    "cache_bytes",
    "context_bytes",
    "copy",
    "copy_s",
    "counts_bytes",
    "current",
    "default_kind",
    "detour",
    "detours",
    "fill",
    "fitting_rooms",
    "fragmented_bytes",
    "has_detour",
    "has_tangents",
    "host_buffer",
    "host_name",
    "is_at_limit",
    "is_in_transform",
    "is_transformed",
    "keep_random_state",
    "lasting_ms",
    "lasting_share",
    "library_bytes",
    "location",
    "memory_bytes",
    "memory_pool",
    "move",
    "observed",
    "parse",
    "parts",
    "pause",
    "peak_bytes",
    "place",
    "queued_ms",
    "record",
    "recording",
    "registries",
    "release_cache",
    "replay_ms",
    "require",
    "resolve",
    "same",
    "set_detours",
    "shared_lane",
    "side_by_side",
    "speed_facts",
    "staged",
    "stand_ins",
    "straight",
    "synchronise",
    "take_detours",
    "type_name",
    "unobserved",
    "unwrapped",
    "warm_libraries",
    "write",
]
