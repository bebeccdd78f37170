"""Models of transformers from a configuration or a checkpoint folder, without their weights."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from placer.errors import InputError, MissingExtraError
from placer.estimator.meta_models import made_on_meta
from placer.utils.error_translation import reason

CONFIG = "config.json"
WEIGHTS_ALONE = "name the safetensors files for an estimate of the weights alone"
DEFAULT_TOKENS = 1024
"""Length of the default input in tokens, where the model allows so many."""

_LOSS_MODELS = ("CausalLM", "LMHead", "MaskedLM", "ConditionalGeneration")
"""Parts of the names of models whose labels have the shape of their tokens."""

_LENGTHS = ("max_position_embeddings", "n_positions", "max_target_positions")


def is_checkpoint(path: Path) -> bool:
    """Return whether a path is a configuration of transformers, or a folder with one."""
    return (path / CONFIG).is_file() if path.is_dir() else path.name.endswith(".json")


def read_config(path: Path, otherwise: str = WEIGHTS_ALONE, with_quantisation: bool = False) -> Any:
    """Return the configuration of transformers in a folder or a file.

    Args:
        path: the folder or file.
        otherwise: what to do without a configuration that can be read, for messages.
        with_quantisation: whether its weights may be quantised.

    Raises:
        InputError: it is not such a configuration, or it needs code from elsewhere.
        MissingExtraError: transformers is not installed.
    """
    file = path / CONFIG if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {file}: {error}") from error
    if not isinstance(content, dict) or "model_type" not in content:
        raise InputError(
            f"{file} has no model_type, so it is not a configuration of transformers; {otherwise}"
        )
    if content.get("quantization_config") and not with_quantisation:
        raise InputError(
            f"{file} describes quantised weights, whose layers are not known without them;"
            f" {otherwise}"
        )
    library = transformers_library()
    try:
        return library.AutoConfig.from_pretrained(str(file), trust_remote_code=False)
    except ImportError as error:
        raise InputError(
            f"transformers {library.__version__} cannot import what {file} needs: {reason(error)};"
            " install versions of torch, torchvision and transformers that fit together"
        ) from error
    except Exception as error:  # whatever transformers raises about a configuration
        raise InputError(
            f"transformers {library.__version__} cannot read {file}: {reason(error)}"
        ) from error


def model_of(
    config: Any,
    dtype: torch.dtype | None,
    made: Callable[[Callable[[], Any]], Any] = made_on_meta,
) -> nn.Module:
    """Return the model that a configuration describes, on ``meta``.

    Args:
        config: of transformers.
        dtype: of the parameters; None for the configuration's own, or else float32.
        made: calls a function that makes a model, and decides what is on ``meta``.

    Raises:
        InputError: transformers cannot make the model.
    """
    library = transformers_library()
    kind = dtype or _own_dtype(config) or torch.float32

    def make() -> Any:
        for name in getattr(config, "architectures", None) or ():
            known = getattr(library, name, None)
            if known is not None:
                return known._from_config(config, dtype=kind)
        return library.AutoModel.from_config(config, dtype=kind)

    try:
        model = made(make)
    except Exception as error:  # whatever transformers raises about a model
        names = getattr(config, "architectures", None) or [config.model_type]
        raise InputError(
            f"transformers {library.__version__} cannot make {names[0]}: {reason(error)}"
        ) from error
    if not isinstance(model, nn.Module):
        raise InputError(
            f"{type(config).__name__} makes no torch.nn.Module; make the model yourself, and "
            "give it"
        )
    return model


def default_inputs(
    model: nn.Module, training: bool, shape: Sequence[int] | None = None, tokens: int | None = None
) -> dict[str, Tensor]:
    """Return inputs for one micro-batch of a model of transformers.

    Args:
        model: the model.
        training: whether labels are added, so that the model computes its loss.
        shape: of the main input; by default one sample of ``DEFAULT_TOKENS`` tokens, or one image
            of the configuration's size.
        tokens: largest default length; None for no limit.

    Raises:
        InputError: the model's main input is neither tokens nor images.
    """
    config: Any = model.config
    main = str(getattr(model, "main_input_name", "input_ids"))
    if main == "pixel_values":
        size = shape or (1, getattr(config, "num_channels", 3), *_image_size(config))
        return {main: torch.zeros(tuple(size), dtype=_dtype_of(model), device="meta")}
    if main != "input_ids":
        raise InputError(
            f"{type(model).__name__} reads {main!r}, whose shape is unknown; give the inputs, as in"
            f" --input {main}=1x80x3000"
        )
    size = tuple(shape) if shape else (1, _length(model, tokens))
    ids = torch.zeros(size, dtype=torch.int64, device="meta")
    inputs = {main: ids}
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = ids.clone()
    named = type(model).__name__
    takes_labels = "labels" in inspect.signature(model.forward).parameters
    if training and any(part in named for part in _LOSS_MODELS) and takes_labels:
        inputs["labels"] = ids.clone()
    return inputs


def require_tokens(model: nn.Module, inputs: Any, shape: Sequence[int] | None) -> None:
    """Raise an InputError if a model of tokens gets a shape or inputs that are no tokens.

    Args:
        model: a model of transformers.
        inputs: its inputs, if they are not a shape.
        shape: of its main input; None if inputs are given, or nothing.
    """
    main = str(getattr(model, "main_input_name", "input_ids"))
    if main != "input_ids":
        return
    if shape is not None and len(shape) != 2:
        given = "x".join(map(str, shape))
        raise InputError(
            f"the shape of {main} is {given}; give samples and tokens, as in 1x{shape[-1]}"
        )
    ids = inputs.get(main) if isinstance(inputs, dict) else None
    if isinstance(ids, Tensor) and ids.is_floating_point():
        given = "x".join(map(str, ids.shape))
        raise InputError(
            f"{main} is {str(ids.dtype).removeprefix('torch.')}, but tokens are whole numbers;"
            f" write {main}={given}:int64"
        )


@contextmanager
def without_cache(module: nn.Module) -> Iterator[None]:
    """Let a model of transformers return no keys and values inside the block.

    ``kv_cache.cache_bytes`` counts them.
    """
    config = getattr(module, "config", None)
    before = getattr(config, "use_cache", None)
    if not isinstance(before, bool) or not hasattr(config, "get_text_config"):
        yield
        return
    assert config is not None  # it has the attribute
    config.use_cache = False
    try:
        yield
    finally:
        config.use_cache = before


def most_tokens(model: nn.Module) -> int | None:
    """Return the length of the longest text that a model's configuration allows; None if unknown.

    Args:
        model: a model of transformers.
    """
    text = model.config.get_text_config()  # type: ignore[union-attr, operator]
    known = (getattr(text, name, None) for name in _LENGTHS)
    return min((one for one in known if isinstance(one, int) and one > 0), default=None)


def transformers_library() -> Any:
    """Return the package transformers.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise MissingExtraError(
            "a configuration or checkpoint of transformers needs transformers: pip install"
            f" 'torch-placer[transformers]' ({reason(error)})"
        ) from error
    return transformers


def _own_dtype(config: Any) -> torch.dtype | None:
    for part in (config, config.get_text_config()):
        found = vars(part).get("dtype")
        if isinstance(found, str):
            found = getattr(torch, found.removeprefix("torch."), None)
        if isinstance(found, torch.dtype):
            return found
    return None


def _length(model: nn.Module, tokens: int | None) -> int:
    limits = (most_tokens(model), tokens)
    return min((DEFAULT_TOKENS, *(one for one in limits if one is not None and one > 0)))


def _image_size(config: Any) -> tuple[int, int]:
    size = getattr(config, "image_size", None) or 224
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[-1]))


def _dtype_of(model: nn.Module) -> torch.dtype:
    floats = (one.dtype for one in model.parameters() if one.is_floating_point())
    return next(floats, torch.float32)
