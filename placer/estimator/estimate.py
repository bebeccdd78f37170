"""``estimate``: will a model fit, and on which devices? Without GPUs, and without its weights.

model, configuration, checkpoint ──▶ fake profile ──▶ placement by memory ──▶ Estimate
safetensors header ──▶ weights alone ──▶                                ──▶ changes that fit
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from placer.capture import input_forms
from placer.capture.argument_checks import require_module
from placer.capture.batch_dims.batch_layout import Parameters
from placer.capture.batch_dims.declared_layout import DEFAULT_OPTIONS
from placer.capture.input_forms import carried_inputs
from placer.capture.pytrees import flatten
from placer.errors import InputError
from placer.estimator import checkpoints, kv_cache, weight_files
from placer.estimator.device_sizes import cluster_of, sized_cluster
from placer.estimator.fake_profile import estimated_profile
from placer.estimator.memory_search import (
    Asked,
    Estimated,
    ShorterTexts,
    SmallerBatches,
    estimated,
)
from placer.estimator.meta_models import cast, meta_copy
from placer.profiler import profile_inputs
from placer.profiler.loss_measurement import given_loss
from placer.schema import Cluster, Estimate, EstimateOptions, Profile, ProfileOptions
from placer.schema.base import module_paths, paths_around
from placer.schema.options import combined
from placer.utils.dtypes import as_dtype
from placer.utils.garbage_collection import paused_collection
from placer.utils.units import bytes_text, listed

__all__ = ["estimate"]


@paused_collection()
def estimate(
    model: Any,
    example_inputs: Any = None,
    devices: str | Sequence[int | str] | Cluster | None = None,
    *,
    training: bool | None = None,
    generate: int | None = None,
    dtype: Any = None,
    options: EstimateOptions | None = None,
    **fields: Any,
) -> Estimate:
    """Estimate the memory of a model on devices that need not exist here.

    The model runs on fake tensors: no weights are read, and no device is used.

        estimate(model, inputs, "4x24GiB", training=True, optimizer="adamw", chunks=8)
        estimate("path/to/checkpoint", devices="2x24GiB", generate=4096)
        estimate("path/to/checkpoint")

    Args:
        model: any module, best on ``meta``; a configuration of transformers; or the path of such a
            configuration, of a checkpoint folder, or of safetensors files, whose headers give the
            weights alone.
        example_inputs: one micro-batch: one argument, a tuple of positional or a dict of keyword
            arguments; ``meta`` tensors suffice. For a configuration or checkpoint also the shape of
            its main input: ``(8, 2048)``. None: the inputs that the model carries, or inputs made
            from the configuration.
        devices: sizes of memory: text such as ``"4x24GiB"`` or ``"24GiB,12GiB"``, a list of bytes,
            or a Cluster. None: one device without a limit, and the numbers of common cards on
            which the model fits.
        training: whether to estimate a training step, or inference (by default).
        generate: tokens of each text, prompt included, whose keys and values the cache holds; for
            models of transformers, in inference.
        dtype: of parameters and floating-point inputs. None: as the model or configuration has it.
        options: optimizer, micro-batches and assumptions, in addition to the arguments above.
        fields: single fields of ``options``, for short.

    Returns:
        The memory of each device in the best placement by memory, whether the model fits, and the
        smallest changes with which it fits.

    Raises:
        InputError: an argument cannot be used. The message names it.
        MissingExtraError: transformers is not installed, and the model is a configuration of it.
        CaptureError: the model's layers cannot be captured.
        ProfilingError: a layer cannot run on fake tensors.
    """
    direct = {"training": training, "generate": generate, "dtype": dtype}
    fields |= {name: given for name, given in direct.items() if given is not None}
    how = combined(EstimateOptions, options, fields, estimate)
    if how.generate is not None and how.training:
        raise InputError(
            f"generate is {how.generate}, but training has no cache; give one of the two"
        )
    cluster = None if devices is None else cluster_of(devices, how.reserve_bytes)
    path = Path(os.fspath(model)) if isinstance(model, str | os.PathLike) else None
    if path is not None and _holds_weights_alone(path):
        found = _of_weights(path, example_inputs, cluster, how)
    else:
        found = _of_module(_subject(model, path, example_inputs, how), cluster, how)
    notes = found.notes
    if how.reserve_bytes and not isinstance(devices, Cluster):
        reserve = bytes_text(how.reserve_bytes)
        notes = (
            f"of each device, {reserve} are reserved for the CUDA context and libraries",
            *notes,
        )
    return found.model_copy(update={"notes": notes})


class _Subject(NamedTuple):
    """A model with the inputs of one micro-batch."""

    module: nn.Module
    inputs: Any


def _holds_weights_alone(path: Path) -> bool:
    """Return whether only headers of safetensors files are at a path.

    Raises:
        InputError: nothing there can be estimated.
    """
    if not path.exists():
        raise InputError(
            f"there is no file or folder {path}; give a checkpoint folder, a configuration, a"
            " safetensors file or a module"
        )
    if checkpoints.is_checkpoint(path):
        return False
    if weight_files.is_weight_file(path):
        return True
    raise InputError(
        f"{path} has neither {checkpoints.CONFIG} nor safetensors files; give a checkpoint folder,"
        " a configuration or a safetensors file"
    )


def _of_weights(
    path: Path, example_inputs: Any, cluster: Cluster | None, how: EstimateOptions
) -> Estimate:
    given = {
        "example_inputs": example_inputs is not None,
        "training": how.training,
        "generate": how.generate is not None,
        "dtype": how.dtype is not None,
    }
    for name, is_given in given.items():
        if is_given:
            raise InputError(
                f"{name} is given, but {path} holds weights alone, without a model; name a folder"
                f" with {checkpoints.CONFIG}, or leave {name} out"
            )
    found = estimated(weight_files.weights_profile(path), cluster, _asked(how, {}))
    note = "only weights are known: activations, workspace and caches are left out"
    return found.model_copy(update={"weights_only": True, "notes": (note, *found.notes)})


def _subject(model: Any, path: Path | None, example_inputs: Any, how: EstimateOptions) -> _Subject:
    """Return the module and its inputs, with the dtype that was asked for."""
    dtype = as_dtype(how.dtype)
    if path is not None:
        model = checkpoints.read_config(path)
    if hasattr(model, "model_type") and hasattr(model, "get_text_config"):
        module = checkpoints.model_of(model, dtype)
        shape = _shape(example_inputs)
        checkpoints.require_tokens(module, example_inputs, shape)
        if example_inputs is None or shape is not None:
            made = checkpoints.default_inputs(module, how.training, shape, how.generate)
            return _Subject(module, made)
        return _Subject(module, cast(example_inputs, dtype))
    require_module(model, "an nn.Module, a configuration of transformers, or the path of one")
    inputs = carried_inputs(model, "estimate") if example_inputs is None else example_inputs
    if dtype is not None:
        return _Subject(meta_copy(model, dtype), cast(inputs, dtype))
    return _Subject(model, inputs)


def _shape(given: Any) -> tuple[int, ...] | None:
    """Return the shape of the main input, if that is given instead of inputs."""
    is_shape = isinstance(given, tuple) and given and all(type(size) is int for size in given)
    return given if is_shape else None


def _of_module(subject: _Subject, cluster: Cluster | None, how: EstimateOptions) -> Estimate:
    module, inputs = subject
    devices = cluster or sized_cluster([1], 0)

    def profile_of(given: Any, target: Any) -> Estimated:
        measuring = ProfileOptions(
            optimizer=how.optimizer,
            granularity=how.granularity,
            loss_fn=how.loss_fn,
            target=target,
            batch_options=how.batch_options,
        )
        with checkpoints.without_cache(module):
            profile = estimated_profile(module, given, devices, measuring, training=how.training)
        return profile, _cache(module, profile, given, how.generate)

    profile, cache = profile_of(inputs, how.target)
    shorter = how.generate and ShorterTexts(
        how.generate, lambda tokens: _cache(module, profile, inputs, tokens)
    )
    smaller = _smaller(subject, how, profile_of)
    found = estimated(profile, cluster, _asked(how, cache), smaller, shorter or None)
    notes = list(found.notes)
    # With labels, a model of transformers computes its loss in its forward method.
    has_own_loss = isinstance(inputs, Mapping) and "labels" in inputs
    if how.training and how.loss_fn is None and not has_own_loss:
        notes.append("a loss outside the model's forward method is left out")
    notes += _left_out(module, profile)
    if not profile.captured:
        notes.append(f"the model was estimated through hooks: {profile.not_captured_because}")
    return found.model_copy(
        update={"generate": how.generate, "inputs": _texts(inputs), "notes": tuple(notes)}
    )


def _smaller(
    subject: _Subject, how: EstimateOptions, profile_of: Callable[[Any, Any], Estimated]
) -> SmallerBatches | None:
    """Return smaller micro-batches of the model; None if its inputs have no samples."""
    options = how.batch_options or DEFAULT_OPTIONS
    tensors, structure, layout = profile_inputs.trackable(
        *input_forms.call_arguments(subject.inputs, "example_inputs"),
        options,
        Parameters.from_module(subject.module),
    )
    if layout.lists or all(dim is None for dim in layout.dims):
        return None

    def resized(size: int) -> Estimated:
        (smaller,) = profile_inputs.resized(tensors, layout, [size])
        args, kwargs = structure.unflatten(smaller)
        return profile_of(kwargs or args, _target(how, layout.size, size))

    sizes = [size for size in range(1, layout.size) if layout.size % size == 0]
    return SmallerBatches(sizes, resized)


def _target(how: EstimateOptions, samples: int, size: int) -> Any:
    """Return the target of a smaller micro-batch; None without a loss."""
    options = how.batch_options or DEFAULT_OPTIONS
    loss = given_loss(how.loss_fn, how.target, how.training, samples, options)
    if loss is None:
        return None
    (smaller,) = loss.resized([size])
    return smaller.structure.unflatten(smaller.target)


def _left_out(module: nn.Module, profile: Profile) -> Iterator[str]:
    """Yield a note about parameters that no layer of the profile has, as of an image encoder."""
    whole = sum(one.numel() * one.element_size() for one in module.parameters())
    missing = whole - sum(layer.param_bytes for layer in profile.layers)
    unused = _unused_modules(module, profile)
    if missing > 0 and unused:
        yield (
            f"{bytes_text(missing)} of parameters are left out, because the model does not run"
            f" {listed(unused, 3)} with these inputs; give inputs with which it does"
        )


def _unused_modules(module: nn.Module, profile: Profile) -> list[str]:
    """Return the outermost modules with parameters that no layer of the profile comes from."""
    ran = {path for layer in profile.layers for path in module_paths(layer.name)}
    above = {outer for path in ran for outer in paths_around(path)}
    known, unused = {*ran}, []
    for path, one in module.named_modules():
        is_outside = path not in above and known.isdisjoint([path, *paths_around(path)])
        if path and is_outside and next(one.parameters(), None) is not None:
            unused.append(path)
            known.add(path)
    return unused


def _cache(module: nn.Module, profile: Profile, inputs: Any, tokens: int | None) -> dict[str, int]:
    if tokens is None:
        return {}
    lengths = [
        leaf.shape[1]
        for leaf in _tensors(inputs)
        if leaf.dim() == 2 and not leaf.is_floating_point()
    ]
    return kv_cache.cache_bytes(
        module,
        [layer.name for layer in profile.layers],
        profile.batch_size,
        tokens,
        max(lengths, default=1),
    )


def _tensors(inputs: Any) -> list[Tensor]:
    return [leaf for leaf in flatten(inputs)[0] if isinstance(leaf, Tensor)]


def _texts(inputs: Any) -> tuple[str, ...]:
    """Return the inputs as words, as a command line gives them."""
    args, kwargs = input_forms.call_arguments(inputs, "example_inputs")
    named: list[tuple[str, Any]] = [*((("", one)) for one in args), *kwargs.items()]
    texts = []
    for name, one in named:
        for tensor in _tensors(one):
            shape = "x".join(map(str, tensor.shape)) or "scalar"
            kind = str(tensor.dtype).removeprefix("torch.")
            texts.append(f"{name}{'=' if name else ''}{shape}:{kind}")
    return tuple(texts)


def _asked(how: EstimateOptions, cache_bytes: dict[str, int]) -> Asked:
    return Asked(
        chunks=how.chunks,
        schedule=how.schedule,
        recompute=how.recompute,
        cache_bytes=cache_bytes,
        reserve_bytes=how.reserve_bytes,
        time_limit_s=how.time_limit_s,
    )
