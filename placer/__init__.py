"""Placer finds where each layer of a PyTorch model should run.

    profile  ->  solve  ->  serve  ->  apply
    (torch)      (OR-Tools)  (FastAPI)   (torch)

All public names but the errors are resolved when first used, so importing placer imports neither
torch nor OR-Tools.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from placer.errors import (
    BatchError,
    CaptureError,
    InfeasibleError,
    InputError,
    MissingExtraError,
    MixedDevicesError,
    PlacementError,
    PlacerError,
    ProfileError,
    ProfilingError,
    ServerError,
    SolveLimitError,
    StageError,
    TimeoutExceeded,
    UnreachableError,
)
from placer.utils.garbage_collection import paused_collection

if TYPE_CHECKING:
    from placer import distributed, testing
    from placer.capture.capture import capture_graph
    from placer.checkpoints.load import load
    from placer.checkpoints.meta_parameters import on_meta
    from placer.estimator.estimate import estimate
    from placer.evaluation.evaluate import evaluate
    from placer.executor.dataflow import DataFlow
    from placer.executor.dataflows import DataFlows
    from placer.pretrained.from_pretrained import from_pretrained
    from placer.pretrained.pretrained import Pretrained
    from placer.profiler.merge import merge_profiles
    from placer.profiler.profile import profile
    from placer.profiler.remote.gather import gather_profile
    from placer.refinement.refine import refine
    from placer.schema import (
        BatchOptions,
        Cluster,
        Constraints,
        Estimate,
        EstimateOptions,
        GenerationOptions,
        Placement,
        PlacementRequest,
        Profile,
        ProfileOptions,
        RefineOptions,
        SolveOptions,
        SuggestOptions,
    )
    from placer.schema.joint import JointPlacement, JointRequest
    from placer.schema.refinement import Refinement
    from placer.solver.solve import solve
    from placer.solver.together import solve_together
    from placer_client.suggest import suggest
    from placer_client.suggest_together import ModelUse, suggest_together

__all__ = [
    "BatchError",
    "BatchOptions",
    "CaptureError",
    "Cluster",
    "Constraints",
    "DataFlow",
    "DataFlows",
    "Estimate",
    "EstimateOptions",
    "GenerationOptions",
    "InfeasibleError",
    "InputError",
    "JointPlacement",
    "JointRequest",
    "MissingExtraError",
    "MixedDevicesError",
    "ModelUse",
    "Placement",
    "PlacementError",
    "PlacementRequest",
    "PlacerError",
    "Pretrained",
    "Profile",
    "ProfileError",
    "ProfileOptions",
    "ProfilingError",
    "RefineOptions",
    "Refinement",
    "ServerError",
    "SolveLimitError",
    "SolveOptions",
    "StageError",
    "SuggestOptions",
    "TimeoutExceeded",
    "UnreachableError",
    "capture_graph",
    "distributed",
    "estimate",
    "evaluate",
    "from_pretrained",
    "gather_profile",
    "load",
    "merge_profiles",
    "on_meta",
    "profile",
    "refine",
    "solve",
    "solve_together",
    "suggest",
    "suggest_together",
    "testing",
]

try:
    __version__ = version("torch-placer")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"

_MODULES = ("distributed", "testing")
_HOMES = {
    "BatchOptions": "placer.schema",
    "Cluster": "placer.schema",
    "Constraints": "placer.schema",
    "DataFlow": "placer.executor.dataflow",
    "DataFlows": "placer.executor.dataflows",
    "Estimate": "placer.schema",
    "EstimateOptions": "placer.schema",
    "GenerationOptions": "placer.schema",
    "JointPlacement": "placer.schema.joint",
    "JointRequest": "placer.schema.joint",
    "ModelUse": "placer_client.suggest_together",
    "Placement": "placer.schema",
    "PlacementRequest": "placer.schema",
    "Pretrained": "placer.pretrained.pretrained",
    "Profile": "placer.schema",
    "ProfileOptions": "placer.schema",
    "RefineOptions": "placer.schema",
    "Refinement": "placer.schema.refinement",
    "SolveOptions": "placer.schema",
    "SuggestOptions": "placer.schema",
    "capture_graph": "placer.capture.capture",
    "estimate": "placer.estimator.estimate",
    "evaluate": "placer.evaluation.evaluate",
    "from_pretrained": "placer.pretrained.from_pretrained",
    "gather_profile": "placer.profiler.remote.gather",
    "load": "placer.checkpoints.load",
    "merge_profiles": "placer.profiler.merge",
    "on_meta": "placer.checkpoints.meta_parameters",
    "profile": "placer.profiler.profile",
    "refine": "placer.refinement.refine",
    "solve": "placer.solver.solve",
    "solve_together": "placer.solver.together",
    "suggest": "placer_client.suggest",
    "suggest_together": "placer_client.suggest_together",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return _import(f"placer.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'placer' has no attribute {name!r}")
    return getattr(_import(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


@paused_collection()
def _import(module: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name == "torch":
            raise MissingExtraError(
                "torch is not installed: pip install 'torch-placer[torch]'"
            ) from error
        raise
