"""The placement that needs the least memory, the smallest changes that make it fit, and cards.

    profile ─▶ solve with limits ──▶ fits
                    │ infeasible
                    ▼
               solve with the largest devices unlimited ─▶ the memory that is missing
                    │
                    ▼
               solve changed requests ─▶ the smallest changes that fit

A contiguous placement is sought with the largest devices unlimited first. The least use is found in
a moment and shows whether a placement within the limits exists; proving that without it takes
longer.

Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import NamedTuple

from placer.errors import InputError
from placer.estimator.device_sizes import (
    grown,
    largest_devices,
    sized_cluster,
    untyped,
    with_more,
    with_sizes,
)
from placer.estimator.memory_profiles import state_alone, untimed, with_cache
from placer.schema import (
    CardCount,
    Change,
    Cluster,
    Constraints,
    DeviceEstimate,
    Estimate,
    Placement,
    PlacementRequest,
    Profile,
    Recompute,
    Schedule,
)
from placer.schema.base import LARGEST_BYTES, MAX_DEVICES
from placer.solver.explain.infeasible import plain_reason
from placer.solver.problem import Problem
from placer.solver.reduce import reduced
from placer.solver.replicas.sharding import sharded_step
from placer.solver.solve import solve
from placer.solver.step import state_on_host
from placer.utils.units import count_text, devices_text, needed_text, number_text, size_text

CARDS_BYTES = (24 * 2**30, 48 * 2**30, 80 * 2**30)
"""Memory of common cards, which are asked for if no devices are given."""

MOST_MORE = 64
"""Largest number of devices that are added, or of cards that are tried."""

LONGEST_SOLVE_S = 3.0
"""Seconds of one solve; a chain of 300 layers takes a tenth of a second."""

FIRST_WORK = 0.1
"""Work limit of the first solve of a question, two tenths of a second of CP-SAT."""

Estimated = tuple[Profile, dict[str, int]]
"""A profile, and the keys and values of generated texts by layer, in bytes."""


class SmallerBatches(NamedTuple):
    """Micro-batches with fewer samples, which are estimated when they are needed.

    Attributes:
        sizes: numbers of samples, ascending; each divides the number of the profile.
        estimated: estimates one of these sizes.
    """

    sizes: Sequence[int]
    estimated: Callable[[int], Estimated]


class ShorterTexts(NamedTuple):
    """Texts with fewer tokens, whose caches are estimated when they are needed.

    Attributes:
        tokens: the number that does not fit.
        cached: returns the bytes of keys and values by layer, for a number of tokens.
    """

    tokens: int
    cached: Callable[[int], dict[str, int]]


@dataclass(frozen=True)
class Asked:
    """The assumptions of an estimate.

    Attributes:
        chunks: micro-batches in a batch.
        schedule: the order of micro-batches.
        recompute: which devices recompute.
        cache_bytes: keys and values of generated texts, by layer, for the whole micro-batch.
        reserve_bytes: the part of a common card that the model cannot use.
        time_limit_s: seconds for all solves.
    """

    chunks: int
    schedule: Schedule
    recompute: Recompute | dict[str, Recompute]
    cache_bytes: dict[str, int]
    reserve_bytes: int
    time_limit_s: float


def estimated(
    profile: Profile,
    cluster: Cluster | None,
    asked: Asked,
    smaller: SmallerBatches | None = None,
    shorter: ShorterTexts | None = None,
) -> Estimate:
    """Return the estimate of a profile's memory on devices.

    Args:
        profile: the memory of each layer; times do not count.
        cluster: the devices; None for one device without a limit.
        asked: the assumptions.
        smaller: smaller micro-batches to try; None for no others.
        shorter: shorter texts to try; None for no others.

    Raises:
        InputError: the figures are too large to add up.
    """
    search = MemorySearch(profile, cluster, asked)
    placement, fits = search.best()
    changes: tuple[Change, ...] = ()
    cards: tuple[CardCount, ...] = ()
    notes: list[str] = []
    if cluster is None:
        cards = tuple(search.cards())
    elif fits is False:
        changes = tuple(search.changes(smaller, shorter))
    if search.ran_out:
        notes.append(
            f"the time limit of {asked.time_limit_s:g} s ended before everything was solved; a"
            " larger time_limit_s may find more"
        )
    training = profile.training
    return Estimate(
        model=profile.model,
        training=training,
        optimizer=profile.optimizer if training else None,
        batch_size=profile.batch_size,
        chunks=asked.chunks if training else 1,
        schedule=asked.schedule,
        fits=fits,
        proven=placement.status == "optimal",
        devices=search.device_estimates(placement),
        recompute=placement.recompute,
        layer_devices=placement.layer_devices,
        changes=changes,
        cards=cards,
        notes=tuple(notes),
    )


class MemorySearch:
    """Solves for the placement that needs the least memory, and for changes of the question.

    Args:
        profile: the memory of each layer.
        cluster: the devices; None for one device without a limit.
        asked: the assumptions.

    Attributes:
        ran_out: whether the time ended before everything was solved.
    """

    def __init__(self, profile: Profile, cluster: Cluster | None, asked: Asked) -> None:
        self._uncached = untimed(profile)
        self._profile = with_cache(self._uncached, asked.cache_bytes)
        self._unlimited = cluster is None
        self._cluster = untyped(cluster or sized_cluster([LARGEST_BYTES], 0))
        self._asked = asked
        # only solves count: estimates of smaller micro-batches may take longer
        self._left_s = asked.time_limit_s
        self.ran_out = False

    def best(self) -> tuple[Placement, bool | None]:
        """Return the placement by memory, and whether it fits; None if that is unknown.

        Where nothing fits, the largest devices hold more than their limit, as little as possible.

        Raises:
            InputError: no placement exists, whatever the memory.
        """
        found, fits = self._solved(self._cluster)
        if not found.layer_devices:
            found, _ = self._solved(grown(self._cluster, largest_devices(self._cluster)))
        if not found.layer_devices:
            raise InputError(
                "the layers cannot be placed on these devices, whatever their memory:"
                f" {found.infeasible.text}"
                if found.infeasible
                else "no placement was found in time; allow more with time_limit_s"
            )
        return found, None if self._unlimited else fits

    def device_estimates(self, placement: Placement) -> tuple[DeviceEstimate, ...]:
        """Return the memory of each device under a placement, with the limits that were given."""
        cached = dict.fromkeys((device.name for device in self._cluster.devices), 0)
        for layer, size in self._asked.cache_bytes.items():
            cached[placement.layer_devices[layer]] += size
        return tuple(
            DeviceEstimate(
                device=load.device,
                layers=load.layers,
                memory=load.memory.model_copy(
                    update={"buffer_bytes": load.memory.buffer_bytes - cached[load.device]}
                ),
                cache_bytes=cached[load.device],
                total_bytes=load.memory.total_bytes,
                memory_bytes=None if self._unlimited else device.memory_bytes,
                limit_bytes=None if self._unlimited else device.usable_bytes,
            )
            for load, device in zip(placement.devices, self._cluster.devices, strict=True)
        )

    def cards(self) -> Iterator[CardCount]:
        """Yield the smallest number of common cards on which the model fits, by size.

        Cards that are larger than one that suffices alone are left out.
        """
        for size in CARDS_BYTES:
            if size <= self._asked.reserve_bytes:
                continue
            one = untyped(sized_cluster([size], self._asked.reserve_bytes))
            found = self._fewest(one, counted=1)
            if found is None:
                continue
            placement, cluster = found
            count = len(cluster.devices)
            total, limit = _fullest(placement, cluster)
            yield CardCount(memory_bytes=size, devices=count, total_bytes=total, limit_bytes=limit)
            if count == 1:
                return

    def changes(
        self, smaller: SmallerBatches | None, shorter: ShorterTexts | None = None
    ) -> Iterator[Change]:
        """Yield the smallest changes with which the model fits, each alone.

        A smaller micro-batch is combined with recomputation where neither suffices alone.

        Args:
            smaller: smaller micro-batches to try; None for no others.
            shorter: shorter texts to try; None for no others.
        """
        texts = None if shorter is None else self._shorter_texts(shorter)
        if texts is not None:
            yield texts
        batch = self._smaller_batch(smaller, self._asked.recompute)
        if batch is not None:
            yield batch
        again = self._recomputing()
        if again is not None:
            yield again
        elif batch is None and self._may_recompute():
            both = self._smaller_batch(smaller, "auto")
            if both is not None:
                yield both
        on_host = self._state_on_host()
        if on_host is not None:
            yield on_host
        sharded = self._sharding()
        if sharded is not None:
            yield sharded
        yield from self._one_more()
        yield from self._larger()

    def _smaller_batch(
        self, batches: SmallerBatches | None, recompute: Recompute | dict[str, Recompute]
    ) -> Change | None:
        """Return the largest smaller micro-batch that fits and divides the batch alike."""
        now = self._profile.batch_size
        sizes = () if batches is None else batches.sizes
        if batches is None or not sizes or not self._fits_without_samples(recompute):
            return None
        best: tuple[Profile, Placement, int] | None = None
        # Memory grows with the batch, so a binary search finds the largest size that fits.
        low, high = 0, len(sizes)
        while low < high and not self._over():
            middle = (low + high) // 2
            size = sizes[middle]
            smaller, cache = batches.estimated(size)
            profile = with_cache(untimed(smaller), cache)
            chunks = self._asked.chunks * (now // size)
            found = self._fitting(
                self._cluster, profile=profile, chunks=chunks, recompute=recompute
            )
            if found is not None:
                best, low = (profile, found, chunks), middle + 1
            else:
                high = middle
        if best is None:
            return None
        profile, found, chunks = best
        what = "micro-batches" if self._profile.training else "batches"
        text = f"{what} of {profile.batch_size} instead of {now}"
        if found.recompute:
            text += f", and recompute on {_names(found.recompute)}"
        return self._change("batch-size", text, found, self._cluster, profile.batch_size, chunks)

    def _shorter_texts(self, texts: ShorterTexts) -> Change | None:
        """Return the longest shorter texts that fit, within a fiftieth of their length."""
        if self._fitting(self._cluster, profile=self._uncached) is None:
            return None  # no text is short enough; this saves the estimates of their caches
        best: tuple[int, Placement] | None = None
        low, high = 0, texts.tokens  # as far as is known, ``low`` fits and ``high`` does not
        while high - low > 1 + low // 50 and not self._over():
            middle = (low + high) // 2
            profile = with_cache(self._uncached, texts.cached(middle))
            found = self._fitting(self._cluster, profile=profile)
            if found is not None:
                best, low = (middle, found), middle
            else:
                high = middle
        if best is None:
            return None
        tokens, found = best
        text = f"texts of {count_text(tokens, 'token')} instead of {texts.tokens}"
        return self._change("context", text, found, self._cluster)

    def _fits_without_samples(self, recompute: Recompute | dict[str, Recompute]) -> bool:
        """Return whether parameters and their state fit: otherwise no micro-batch is small enough.

        This saves the estimates of smaller micro-batches.
        """
        if self._over():
            return False
        state = state_alone(self._profile)
        _, fits = self._solved(self._cluster, profile=state, recompute=recompute)
        return fits is not False

    def _may_recompute(self) -> bool:
        return self._profile.training and self._asked.recompute == "never"

    def _recomputing(self) -> Change | None:
        if not self._may_recompute():
            return None
        found = self._fitting(self._cluster, recompute="auto")
        if found is None:
            return None
        text = f"recompute on {_names(found.recompute)}"
        return self._change("recompute", text, found, self._cluster)

    def _state_on_host(self) -> Change | None:
        """Return optimizer state that rests on the host, if the model fits so."""
        if not self._profile.training or not any(
            layer.optimizer_bytes for layer in self._profile.layers
        ):
            return None
        asked = state_on_host.on_host(
            PlacementRequest(profile=self._profile, cluster=self._cluster)
        )
        found = self._fitting(asked.placed_on, profile=asked.profile)
        if found is None:
            return None
        text = "optimizer state on the host (optimizer_state='host')"
        return self._change("optimizer-state", text, found, asked.placed_on)

    def _sharding(self) -> Change | None:
        """Return fully sharded data parallelism on the devices, if the model fits so."""
        devices, size = self._cluster.devices, self._profile.batch_size
        if not self._profile.training or len(devices) < 2:
            return None
        chunks = max(1, self._asked.chunks // len(devices))
        found = sharded_step(
            PlacementRequest(
                profile=self._profile,
                cluster=self._cluster,
                objective="step",
                batch_size=len(devices) * size * chunks,
            )
        )
        if found is None:
            return None
        text = f"shard by FSDP2, with micro-batches of {count_text(size, 'sample')} on each device"
        if chunks * len(devices) != self._asked.chunks:
            text += f", a batch of {chunks * len(devices) * size}"
        return Change(
            kind="sharding",
            change=text,
            batch_size=size,
            chunks=chunks,
            devices=len(devices),
            memory_bytes=tuple(device.memory_bytes for device in devices),
            total_bytes=found.memory_bytes,
            limit_bytes=min(device.usable_bytes for device in devices),
        )

    def _one_more(self) -> Iterator[Change]:
        """Yield the smallest number of further devices like the largest one."""
        largest = max(self._cluster.devices, key=lambda device: device.usable_bytes)
        found = self._fewest(self._cluster)
        if found is not None:
            placement, cluster = found
            more = len(cluster.devices) - len(self._cluster.devices)
            text = f"{devices_text([largest.memory_bytes] * more)} more"
            yield self._change("devices", text, placement, cluster)

    def _larger(self) -> Iterator[Change]:
        """Yield the smallest memory of one of the largest devices, and of all of them."""
        numbers = largest_devices(self._cluster)
        for chosen in ([numbers[:1]] if len(numbers) > 1 else []) + [numbers]:
            found = self._fitting(grown(self._cluster, chosen))
            if found is None:
                continue
            needed = max(found.devices[number].memory.total_bytes for number in chosen)
            usable = [device.usable_bytes for device in self._cluster.devices]
            before = self._cluster.devices[chosen[0]].memory_bytes
            for number in chosen:
                usable[number] = max(usable[number], needed)
            cluster = with_sizes(self._cluster, usable)
            size = cluster.devices[chosen[0]].memory_bytes
            text = (
                f"{number_text(len(chosen), 'device')} of {needed_text(size)} instead of"
                f" {size_text(before)}"
            )
            yield self._change("memory", text, found, cluster)

    def _fewest(self, cluster: Cluster, counted: int = 0) -> tuple[Placement, Cluster] | None:
        """Return the placement with the fewest further devices that fits, by doubling and halving.

        A placement on fewer devices is one on more, so what fits on some number fits on any larger
        one.

        Args:
            cluster: the devices that are there.
            counted: how many of them count as further ones.
        """
        most = min(MOST_MORE, MAX_DEVICES - len(self._cluster.devices), len(self._profile.layers))
        low, high = 1, 1
        best: Placement | None = None
        while best is None and low <= most:
            high = min(max(high, low), most)
            best = self._fitting(with_more(cluster, high - counted))
            if best is None:
                low, high = high + 1, 2 * high
        if best is None:
            return None
        while low < high and not self._over():
            middle = (low + high) // 2
            found = self._fitting(with_more(cluster, middle - counted))
            if found is None:
                low = middle + 1
            else:
                best, high = found, middle
        return best, with_more(cluster, high - counted)

    def _change(
        self,
        kind: str,
        text: str,
        placement: Placement,
        cluster: Cluster,
        batch_size: int | None = None,
        chunks: int | None = None,
    ) -> Change:
        total, limit = _fullest(placement, cluster)
        return Change.model_validate(
            {
                "kind": kind,
                "change": text,
                "batch_size": batch_size or self._profile.batch_size,
                "chunks": chunks or (self._asked.chunks if self._profile.training else 1),
                "recompute": placement.recompute,
                "devices": len(cluster.devices),
                "memory_bytes": tuple(device.memory_bytes for device in cluster.devices),
                "total_bytes": total,
                "limit_bytes": limit,
            }
        )

    def _fitting(
        self,
        cluster: Cluster,
        *,
        profile: Profile | None = None,
        chunks: int | None = None,
        recompute: Recompute | dict[str, Recompute] | None = None,
    ) -> Placement | None:
        """Return the placement by memory if it fits, or None, also if no time is left.

        Args:
            cluster: the devices.
            profile: as for ``_solved``.
            chunks: as for ``_solved``.
            recompute: as for ``_solved``.
        """
        if self._over():
            return None
        found, fits = self._solved(cluster, profile=profile, chunks=chunks, recompute=recompute)
        return found if fits else None

    def _solved(
        self,
        cluster: Cluster,
        *,
        profile: Profile | None = None,
        chunks: int | None = None,
        recompute: Recompute | dict[str, Recompute] | None = None,
    ) -> tuple[Placement, bool | None]:
        """Return the placement by memory, and whether it is within the limits; None if unknown.

        Contiguous layers that do not fit are placed all the same: beyond the limits of the largest
        devices, as little as possible. Solving takes a moment even if the time is over.

        Args:
            cluster: the devices.
            profile: instead of the profile itself.
            chunks: instead of the number that was asked for.
            recompute: instead of the rule that was asked for.
        """
        asked, training, began = self._asked, self._profile.training, monotonic()
        again = asked.recompute if recompute is None else recompute

        def request(devices: Cluster) -> PlacementRequest:
            return PlacementRequest(
                profile=profile or self._profile,
                cluster=devices,
                objective="memory",
                chunks=(chunks or asked.chunks) if training else 1,
                schedule=asked.schedule,
                constraints=Constraints(recompute=again if training else "never"),
                time_limit_s=max(0.5, min(self._left_s, LONGEST_SOLVE_S)),
            )

        requests = [request(cluster)]
        if _may_bind(requests[0]):
            # a placement within the limits uses no more than the largest device may hold
            requests.insert(0, request(grown(cluster, largest_devices(cluster))))
        for one in requests:
            answer = _solved_soon(one)
            fits = _fits(answer, cluster)
            if fits is not None:
                break
        self._left_s -= monotonic() - began
        self.ran_out = self.ran_out or fits is None
        return answer, fits

    def _over(self) -> bool:
        is_over = self._left_s <= 0
        self.ran_out = self.ran_out or is_over
        return is_over


def _solved_soon(request: PlacementRequest) -> Placement:
    """Return the placement of a request, by a short solve first, which usually proves it.

    CP-SAT simplifies a program the longer, the more work it may do: for seconds, where the search
    behind it takes a moment.
    """
    short = solve(request.model_copy(update={"work_limit": FIRST_WORK}))
    return short if short.status in ("optimal", "infeasible") else solve(request)


def _may_bind(request: PlacementRequest) -> bool:
    """Return whether only a search tells if contiguous layers are within the limits."""
    problem = Problem.from_request(request)
    return problem.contiguous and plain_reason(problem, reduced(problem)) is None


def _fits(placement: Placement, cluster: Cluster) -> bool | None:
    """Return whether the smallest largest use is within the limits; None if that is unknown."""
    if not placement.layer_devices:
        return False if placement.infeasible else None
    total, limit = _fullest(placement, cluster)
    return True if total <= limit else False if placement.status == "optimal" else None


def _fullest(placement: Placement, cluster: Cluster) -> tuple[int, int]:
    """Return the memory of the device with the least free memory, and its limit, in bytes."""
    uses = [
        (load.memory.total_bytes, device.usable_bytes)
        for load, device in zip(placement.devices, cluster.devices, strict=True)
    ]
    return max(uses, key=lambda use: use[0] - use[1])


def _names(devices: Sequence[str]) -> str:
    return ", ".join(devices)
