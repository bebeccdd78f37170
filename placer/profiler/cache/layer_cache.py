"""Known measurements of layers, from this run and from earlier runs.

    layer ──▶ signature ─┐
                         ├─▶ key ──▶ seen in this run? in the cache? else: measure and store
    conditions ──────────┘

Each measurement is stored immediately, so an interrupted run continues where it stopped.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import TypeAdapter, ValidationError

from placer.capture.layers import Layer, LayerGraph
from placer.profiler.cache.file_cache import Cache, key_of
from placer.profiler.measurement import Measurement

_ENTRIES = TypeAdapter(Measurement)


class Remembered:
    """Measurements of layers by signature.

    Args:
        cache: results of earlier runs; None for this run only.
        facts: further conditions of the measurements, see ``conditions``.
        repeats: how often passes are timed; cached entries with fewer repeats are ignored.

    Attributes:
        measured: number of layers measured in this run.
        reused: number of layers taken from the cache.
    """

    def __init__(
        self, cache: Cache | None = None, facts: dict[str, Any] | None = None, repeats: int = 1
    ) -> None:
        self._cache = cache
        self._conditions = key_of(**(facts or {}))
        self._repeats = repeats
        self._seen: dict[str, Measurement] = {}
        self.measured = 0
        self.reused = 0

    def get(self, layer: Layer) -> Measurement | None:
        """Return the known measurement of a layer, or None."""
        if (
            layer.signature not in self._seen
            and self._cache is not None
            and layer.signature_is_complete
        ):
            known = self._read(self._cache, layer)
            if known is not None:
                self._seen[layer.signature] = known
                self.reused += 1
        return self._seen.get(layer.signature)

    def put(self, layer: Layer, measurement: Measurement) -> None:
        """Store a measurement."""
        self._seen[layer.signature] = measurement
        self.measured += 1
        if self._cache is not None and layer.signature_is_complete:
            content = {
                "repeats": self._repeats,
                "measurement": _ENTRIES.dump_python(measurement, mode="json"),
            }
            self._cache.write("layers", self._key(layer), content)

    def missing(self, layers: Iterable[Layer]) -> list[Layer]:
        """Return the layers to measure: each unknown signature once, at its first layer."""
        # reversed, so that the first layer of a signature wins
        first = {layer.signature: layer for layer in reversed(list(layers))}
        return [layer for layer in first.values() if self.get(layer) is None]

    def _key(self, layer: Layer) -> str:
        return key_of(layer=layer.signature, conditions=self._conditions)

    def _read(self, cache: Cache, layer: Layer) -> Measurement | None:
        entry = cache.read("layers", self._key(layer))
        try:
            known = _ENTRIES.validate_python(entry["measurement"])
            # pydantic ignores unknown fields, such as the names of an earlier version
            is_same = _ENTRIES.dump_python(known, mode="json") == entry["measurement"]
            return known if is_same and entry["repeats"] >= self._repeats else None
        except (ValidationError, KeyError, TypeError):
            return None


def layers_to_run(graph: LayerGraph, measured: Iterable[Layer]) -> set[str]:
    """Return the names of the layers that must run to measure some of them.

    These are the measured layers and the layers that produce their inputs.
    """
    running = {layer.name for layer in measured}
    needed: set[str] = set()
    for layer in reversed(graph.layers):
        if layer.name in running or not needed.isdisjoint(layer.writes):
            running.add(layer.name)
            needed.update(layer.reads)
    return running
