"""Models whose checkpoints hold quantised weights.

transformers' quantizer of the configuration makes the layers that read them. Times and bytes of
such layers follow from their weights, so these are mapped from the files before the model is
measured.

Source: ``transformers.quantizers`` (read for transformers 5.23).
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn

from placer.checkpoints.load import map_weights
from placer.errors import InputError, MissingExtraError
from placer.estimator.checkpoints import transformers_library

_METHODS = ("bitsandbytes", "torchao")
"""The methods, by the names of their packages, whose layers compute with the weights as
``placer.load`` reads them. Others change them after loading."""


def taken_quantizer(config: Any, otherwise: str) -> Any:
    """Take the quantisation out of a configuration, and return its quantizer of transformers.

    Without it, transformers makes the model with its usual layers.

    Args:
        config: of transformers.
        otherwise: what to do with weights of another method, for messages.

    Returns:
        The quantizer; None for weights that are not quantised.

    Raises:
        InputError: the method is unknown, or a device that it needs is missing.
        MissingExtraError: its package is not installed.
    """
    described = getattr(config, "quantization_config", None)
    if not described:
        return None
    del config.quantization_config
    method = _method(described)
    if method not in _METHODS:
        raise InputError(
            f"the checkpoint has weights quantised by {method}; from_pretrained makes the layers of"
            f" {' and '.join(_METHODS)}; {otherwise}"
        )
    if find_spec(method) is None:
        raise MissingExtraError(
            f"the checkpoint has weights quantised by {method}, which is not installed: pip install"
            f" {method}"
        )
    transformers_library()
    from transformers import quantizers

    try:
        quantizer = quantizers.auto.AutoHfQuantizer.from_config(described, pre_quantized=True)
        quantizer.validate_environment()
    except ImportError as error:
        raise MissingExtraError(
            f"the checkpoint has weights quantised by {method}: {error}"
        ) from error
    except Exception as error:  # whatever transformers raises about a method or a device
        raise InputError(
            f"the checkpoint has weights quantised by {method}, which cannot be used here: {error}"
        ) from error
    return quantizer


def with_weights(model: Any, quantizer: Any, folder: Path) -> nn.Module:
    """Return a model on ``meta`` with the layers of a quantizer, and weights mapped from files.

    Args:
        model: of transformers, with its usual layers.
        quantizer: of transformers.
        folder: with the files.

    Raises:
        InputError: the checkpoint does not fit the model.
    """
    files = sorted(str(file) for file in folder.glob("*.safetensors"))
    quantizer.preprocess_model(model, device_map=None, checkpoint_files=files or None)
    map_weights(model, folder)
    quantizer.postprocess_model(model)
    model.hf_quantizer = quantizer
    found: nn.Module = model.eval()
    return found


def _method(described: Any) -> str:
    """Return the name of a method of quantisation."""
    fields = described if isinstance(described, dict) else vars(described)
    if fields.get("load_in_4bit") or fields.get("load_in_8bit"):
        return "bitsandbytes"
    method = fields.get("quant_method")
    return str(getattr(method, "value", method))
