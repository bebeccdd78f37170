"""A model and its example inputs, as words on a command line.

placer.zoo.resnet:resnet50     the callable that makes the model
num_classes=10                 an argument for it
8x3x224x224                    a positional input: float32, drawn from a normal distribution
2x16:int64                     zeros of a whole-number type, which any embedding can look up
input_ids=2x16:int64           a keyword input
"""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from placer.errors import InputError, kind_of
from placer.schema.faults import similar
from placer.utils.extras import extra
from placer.utils.units import bytes_text

with extra("torch"):
    import torch
    from torch import Tensor, nn


def load_model(spec: str, arguments: Sequence[str] = ()) -> nn.Module:
    """Return the model that a callable makes, or that a module holds.

    Args:
        spec: ``package.module:name``; modules in the working directory are found too.
        arguments: ``key=value`` for the callable; a value is read as JSON, else it is a string.

    Raises:
        InputError: there is no such name, it fails with these arguments, or it makes no
            ``torch.nn.Module``.
    """
    maker = _find(spec, "model")
    if isinstance(maker, nn.Module) and not arguments:
        return maker
    if not callable(maker):
        raise InputError(
            f"{spec!r} is {kind_of(maker)}; name a callable that makes a torch.nn.Module"
        )
    keywords = dict(_argument(text) for text in arguments)
    try:
        model = maker(**keywords)
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        shown = ", ".join(arguments)
        raise InputError(f"{spec}({shown}) failed: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise InputError(f"{spec!r} made {kind_of(model)}; it must make a torch.nn.Module")
    return model


def load_function(spec: str) -> Callable[..., Any]:
    """Return a function by its name, a loss for example.

    Args:
        spec: ``package.module:name``; modules in the working directory are found too.

    Raises:
        InputError: there is no such name, or it cannot be called.
    """
    found = _find(spec, "function")
    if not callable(found):
        raise InputError(f"{spec!r} is {kind_of(found)}; name a function")
    return found


def parse_inputs(texts: Sequence[str]) -> tuple[Tensor, ...] | dict[str, Tensor]:
    """Return example inputs of given shapes and types: all positional, or all by keyword.

    Args:
        texts: ``[NAME=]SHAPE[:DTYPE]`` each, as in ``8x3x224x224`` or ``input_ids=2x16:int64``.

    Raises:
        InputError: one is not of that form, or some have a name and some have none.
    """
    named = {
        text.partition("=")[0]: _tensor(text.partition("=")[2]) for text in texts if "=" in text
    }
    if not named:
        return tuple(_tensor(text) for text in texts)
    if len(named) < len(texts):
        raise InputError(f"inputs {', '.join(texts)}: name each of them once, or none")
    return named


def _find(spec: str, kind: str) -> Callable[..., Any] | nn.Module | object:
    module_name, colon, name = spec.partition(":")
    if not colon or not module_name or not name:
        raise InputError(
            f"{spec!r} names no {kind}; write package.module:callable, as in"
            " placer.zoo.resnet:resnet50"
        )
    if module_name.endswith(".py") or "/" in module_name or os.sep in module_name:
        path = (
            module_name.removesuffix(".py")
            .removeprefix("./")
            .replace(os.sep, "/")
            .strip("/")
            .replace("/", ".")
        )
        raise InputError(
            f"{module_name!r} is a path; write the module's name, as in an import from here:"
            f" {path}:{name}"
        )
    # Unlike ``python -m``, a console script does not search the current folder.
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    found: object = _imported(module_name)
    try:
        for part in name.split("."):
            found = getattr(found, part)
    except AttributeError as error:
        # without a list of names, because the names that the module imports would come first
        hint = similar(name, (known for known in dir(found) if not known.startswith("_")))
        raise InputError(f"there is no {name!r} in module {module_name!r}{hint}") from error
    return found


def _imported(name: str) -> ModuleType:
    """Import the user's module, whose code may raise anything."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        # or the module lacks one that it imports itself
        is_itself = f"{name}.".startswith(f"{error.name}.")
        remedy = "; install it, or start placer in its folder" if is_itself else ""
        raise InputError(f"cannot import {name!r}: {error}{remedy}") from error
    except Exception as error:
        raise InputError(f"cannot import {name!r}: {type(error).__name__}: {error}") from error
    except SystemExit as error:
        raise InputError(
            f"module {name!r} is a program, which ends when it is imported: move its statements"
            " below if __name__ == '__main__'"
        ) from error


def _argument(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier():
        raise InputError(f"{text!r} is not an argument; write KEY=VALUE, as in num_classes=10")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def _tensor(text: str) -> Tensor:
    sizes, _, type_name = text.partition(":")
    dtype = getattr(torch, type_name or "float32", None)
    try:
        shape = [int(size) for size in sizes.split("x")]
    except ValueError:
        shape = []
    if shape and min(shape) > 0 and not isinstance(dtype, torch.dtype):
        raise InputError(
            f"input {text!r}: no dtype of torch is {type_name!r}; give float32, bfloat16, int64,"
            " ..."
        )
    if not shape or min(shape) < 1 or not isinstance(dtype, torch.dtype):
        raise InputError(
            f"{text!r} is not an input; write SHAPE or SHAPE:dtype, as in 8x3x224x224 or 2x16:int64"
        )
    try:
        # Zeros are valid indices of every embedding, whatever its size.
        if dtype.is_floating_point or dtype.is_complex:
            return torch.randn(shape, dtype=dtype)
        return torch.zeros(shape, dtype=dtype)
    except NotImplementedError as error:
        raise InputError(
            f"input {text!r}: torch draws no {type_name}; give float32, bfloat16, int64, ..."
        ) from error
    except (RuntimeError, TypeError) as error:
        size = bytes_text(math.prod(shape) * dtype.itemsize)
        raise InputError(
            f"input {text!r} needs {size}, more than is available; give a smaller micro-batch"
        ) from error
