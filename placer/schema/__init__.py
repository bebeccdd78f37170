"""Wire types of profiles, requests and placements.

    Profile + Cluster  ->  PlacementRequest  ->  Placement

Every quantity has its unit in its name: ``_ms`` milliseconds, ``_s`` seconds, ``_bytes`` bytes.
Unknown fields, NaN, infinities and negative quantities are rejected. The types are immutable;
``model_copy(update=...)`` returns a changed copy.
"""

from __future__ import annotations

from placer.schema.base import (
    SCHEMA_VERSION,
    Limiting,
    Objective,
    Recompute,
    Schedule,
    ScheduleChoice,
    Status,
    StepKind,
    Transfers,
)
from placer.schema.cluster import Cluster, Device, Link, Node, NodeList, Rate
from placer.schema.estimate import CardCount, Change, DeviceEstimate, Estimate, EstimateRequest
from placer.schema.joint import JointOptions, JointPlacement, JointRequest, ProfiledModel
from placer.schema.judgement import Best, Comparison, Evaluation, Fault, FaultKind, LayerMap, Move
from placer.schema.options import (
    BatchOptions,
    Constraints,
    EstimateOptions,
    GenerationOptions,
    ProfileOptions,
    RefineOptions,
    SolveOptions,
    SuggestOptions,
)
from placer.schema.placement import (
    DeviceLoad,
    Generation,
    Improvement,
    Infeasibility,
    Limits,
    MemoryUse,
    Placement,
    Replica,
    ShardedStep,
    SingleDevice,
    Step,
    StepChoice,
    TieBreaks,
)
from placer.schema.profile import Edge, Layer, Profile, TiedParameters
from placer.schema.refinement import Refinement, Round, StageTime
from placer.schema.request import PlacementRequest
from placer.schema.service import (
    Batch,
    BatchAnswer,
    BatchAnswers,
    DeviceTime,
    PlacementPage,
    Progress,
    Summary,
    Timeline,
    TimelineCopy,
    TimelinePass,
)

__all__ = [
    "SCHEMA_VERSION",
    "Batch",
    "BatchAnswer",
    "BatchAnswers",
    "BatchOptions",
    "Best",
    "CardCount",
    "Change",
    "Cluster",
    "Comparison",
    "Constraints",
    "Device",
    "DeviceEstimate",
    "DeviceLoad",
    "DeviceTime",
    "Edge",
    "Estimate",
    "EstimateOptions",
    "EstimateRequest",
    "Evaluation",
    "Fault",
    "FaultKind",
    "Generation",
    "GenerationOptions",
    "Improvement",
    "Infeasibility",
    "JointOptions",
    "JointPlacement",
    "JointRequest",
    "Layer",
    "LayerMap",
    "Limiting",
    "Limits",
    "Link",
    "MemoryUse",
    "Move",
    "Node",
    "NodeList",
    "Objective",
    "Placement",
    "PlacementPage",
    "PlacementRequest",
    "Profile",
    "ProfileOptions",
    "ProfiledModel",
    "Progress",
    "Rate",
    "Recompute",
    "RefineOptions",
    "Refinement",
    "Replica",
    "Round",
    "Schedule",
    "ScheduleChoice",
    "ShardedStep",
    "SingleDevice",
    "SolveOptions",
    "StageTime",
    "Status",
    "Step",
    "StepChoice",
    "StepKind",
    "SuggestOptions",
    "Summary",
    "TieBreaks",
    "TiedParameters",
    "Timeline",
    "TimelineCopy",
    "TimelinePass",
    "Transfers",
]
