"""``DataFlow.generate_many``: groups of sequences that are generated at the same time.

    in flight   prompt 0 ──────────┐   prompt 2 ──────
                prompt 1 ───────────────┐   prompt 3 ─
    results                        0    1

Each group has a thread, which runs the model's own ``generate``. Its loop, with stopping criteria,
logits processors and samplers, reads every token on the host, so one thread would wait for a token
of one group while the others could go on. Threads suffice: CUDA releases Python's global
interpreter lock while a thread waits, and a recorded pass is one launch per stage.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from threading import Event
from typing import Any

import torch
from torch import Tensor

from placer import devices
from placer.capture import autocast
from placer.errors import InputError, kind_of
from placer.executor.engine.compiled_segments import Backend, backend_of
from placer.executor.generation.generations import CancelledError, Generations, result_tensors
from placer.executor.placed_model import PlacedModel
from placer.executor.stage_errors import nothing_held
from placer.utils.option_checks import require_count

Applied = Callable[..., AbstractContextManager[Any]]
"""``PlacedCalls.applied``."""

_ONE_TEXT_EACH = ("streamer", "past_key_values")
"""Arguments of ``generate`` that cannot be shared by several texts."""


def generate_many(
    placed: PlacedModel,
    generations: Generations,
    applied: Applied,
    prompts: Iterable[Any],
    in_flight: int | None,
    compile: bool | Backend,
    options: Mapping[str, Any],
) -> Generator[Any, None, None]:
    """Return the results of ``generate`` for each prompt; see ``DataFlow.generate_many``.

    Args:
        placed: the model.
        generations: of the flow.
        applied: opens ``flow.applied()`` in a thread.
        prompts: an iterable of tensors or mappings.
        in_flight: most generations at the same time; None for the number of devices with weights.
        compile: whether to compile recorded passes; False as around the block.
        options: keyword arguments of ``generate``, for all prompts.

    Raises:
        InputError: if the flow is not placed, the model does not generate, or an argument cannot be
            used.
    """
    if placed.assignment is None:
        raise InputError("generate_many needs a placed flow: call flow.update_flow() first")
    if placed.weights.clones is not None:
        raise InputError("generate_many does not support clones: make the flow without it")
    if not callable(getattr(placed.module, "generate", None)):
        raise InputError(
            f"{type(placed.module).__name__} has no method generate; for batches of a forward pass "
            "use flow.stream"
        )
    if isinstance(prompts, (Tensor, Mapping, str)) or not isinstance(prompts, Iterable):
        raise InputError(
            f"prompts is {kind_of(prompts)}; give an iterable of prompts: [ids], ids.split(8)"
        )
    if in_flight is None:
        assignment = placed.assignment
        names = (name for name, _ in placed.module.named_parameters())
        in_flight = max(1, len({assignment.place_of(name) for name in names}))
    require_count("in_flight", in_flight, "prompts")
    for name in _ONE_TEXT_EACH:
        if options.get(name) is not None:
            raise InputError(
                f"{name} cannot be shared by several prompts; give each prompt its own: "
                f'{{"input_ids": ids, "{name}": ...}}'
            )
    opened = partial(applied, backend=backend_of(compile))
    many = _ManyGenerations(placed, generations, opened, iter(prompts), in_flight, options)
    return many.results()


class _ManyGenerations:
    """The generations of one ``generate_many``.

    Args:
        placed: the model.
        generations: of the flow.
        applied: opens ``flow.applied()`` in a thread.
        source: of the prompts.
        in_flight: most generations at the same time.
        options: of all of them.
    """

    def __init__(
        self,
        placed: PlacedModel,
        generations: Generations,
        applied: Applied,
        source: Iterator[Any],
        in_flight: int,
        options: Mapping[str, Any],
    ) -> None:
        self._placed = placed
        self._generations = generations
        self._applied = applied
        self._source = source
        self._in_flight = in_flight
        self._options = options
        self._pending: deque[Future[Any]] = deque()
        self._taken, self._is_open = 0, True
        self._stop = Event()
        self._is_whole = False

    def results(self) -> Generator[Any, None, None]:
        """Yield the result of each prompt, in their order."""
        with ExitStack() as stack:
            stack.callback(self._free)
            pool = ThreadPoolExecutor(self._in_flight, thread_name_prefix="generate_many")
            stack.callback(pool.shutdown, wait=True, cancel_futures=True)
            # first, so that the generations end at their next pass
            stack.callback(self._stop.set)
            while True:
                self._refill(pool)
                if not self._pending:
                    self._is_whole = True
                    return
                if not self._pending[0].done():
                    wait([one for one in self._pending if not one.done()], None, FIRST_COMPLETED)
                    continue
                with nothing_held():
                    result = self._pending.popleft().result()
                for tensor in result_tensors(result):
                    devices.keep_for_caller(tensor)
                yield result
                del result

    def _free(self) -> None:
        """Free the static caches, unless all prompts are done: the next ones may be like these."""
        if not self._is_whole:
            self._generations.free()

    def _refill(self, pool: ThreadPoolExecutor) -> None:
        """Start generations until enough run, or as many results wait for an earlier prompt."""
        while self._is_open and len(self._pending) < 2 * self._in_flight:
            running = [one for one in self._pending if not one.done()]
            failed = any(one.done() and one.exception() for one in self._pending)
            if failed or len(running) >= self._in_flight:
                return
            self._take(pool)

    def _take(self, pool: ThreadPoolExecutor) -> None:
        """Start the generation of the source's next prompt."""
        number = self._taken
        try:
            prompt = next(self._source)
        except StopIteration:
            self._is_open = False
            return
        except Exception as error:
            error.add_note(f"raised by the source of the prompts, for prompt {number}")
            self._pending.append(_failed(error))
            self._is_open = False
            return
        self._taken += 1
        try:
            arguments = {**self._options, **_arguments(prompt)}
        except InputError as error:
            error.add_note(f"in prompt {number}")
            self._pending.append(_failed(error))
            self._is_open = False
            return
        modes, ready = _caller_modes(), self._caller_marks()
        # A caller inside ``flow.applied()`` waits for these threads.
        is_guest = self._placed.lock.is_in_block

        def generate() -> Any:
            try:
                with (
                    modes(),
                    self._applied(
                        is_guest=is_guest, is_apart=True, is_cancelled=self._stop.is_set
                    ) as model,
                ):
                    for lane, mark in ready():
                        lane.wait(mark)
                    run: Any = model.generate
                    result = run(**arguments)
                    self._generations.release_caches()
                return result
            except CancelledError:
                raise
            except Exception as error:
                error.add_note(f"in prompt {number}")
                raise

        self._pending.append(pool.submit(generate))

    def _caller_marks(self) -> Callable[[], list[tuple[devices.Lane, devices.Mark]]]:
        """Mark this thread's work on all devices, of which the prompt may be a result.

        Returns:
            A function that returns the lanes of the thread that calls it, and the mark for each.
        """
        assignment = self._placed.assignment
        places = [] if assignment is None else assignment.devices
        marks = [devices.Lane(place, caller=True).mark() for place in places]
        return lambda: [
            (devices.Lane(place, caller=True), mark)
            for place, mark in zip(places, marks, strict=True)
        ]


def _arguments(prompt: Any) -> dict[str, Any]:
    """Return a prompt as keyword arguments of ``generate``."""
    if isinstance(prompt, Tensor):
        return {"inputs": prompt}
    if isinstance(prompt, Mapping):
        return dict(prompt)
    raise InputError(
        f"a prompt is {kind_of(prompt)}; give a tensor of token ids, or a dict of generate's "
        "arguments, such as a tokenizer returns"
    )


def _failed(error: Exception) -> Future[Any]:
    """Return a generation that fails without having begun."""
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


def _caller_modes() -> Callable[[], Any]:
    """Return a function that opens this thread's modes of torch in another thread."""
    gradients, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    casts = autocast.current_contexts()

    @contextmanager
    def opened() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(inference))
            stack.enter_context(torch.set_grad_enabled(gradients))
            for cast in casts:
                stack.enter_context(cast())
            yield

    return opened
