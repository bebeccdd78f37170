"""Schedules as data: in which order stages run micro-batches, how many they hold, and how long a step takes.

A step of 3 stages and 4 micro-batches; digits are forward passes, letters backward passes (a belongs to 0), each takes
one unit of time::

    fill-drain      stage 0   0 1 2 3 . . . . a b c d      all forward passes, then all backward passes (GPipe);
                    stage 1   . 0 1 2 3 . . a b c d .      every stage holds 4 micro-batches
                    stage 2   . . 0 1 2 3 a b c d . .

    1f1b            stage 0   0 1 2 . . a 3 b . c . d      stage p of S first runs S - 1 - p forward passes, then one
                    stage 1   . 0 1 . a 2 b 3 c . d .      forward and one backward in turn, then the backward passes
                    stage 2   . . 0 a 1 b 2 c 3 d . .      that are left; it holds S - p micro-batches

Both take (chunks + stages - 1) * (forward + backward) where stages are equal and transfers free. With backward passes
in two halves, of inputs (letters) and of weights (capitals), of one unit each::

    zero-bubble     stage 0   0 1 2 3 . a A b B c C d D .  weight halves, which nobody waits for, fill the bubbles;
                    stage 1   . 0 1 2 a 3 b A c B d C D .  a stage holds up to 2 S - 1 micro-batches
                    stage 2   . . 0 a 1 b 2 c 3 d A B C D

With several stages a device, here 4 on 2, so that filling takes less::

    interleaved     stage 0   0 1 . . 2 . 3 . . a . b . . . . c d  stages 0 and 2 are on one device, 1 and 3 on the
                    stage 1   . 0 1 . . . . 2 a 3 b . . . . c d .  other: rounds of 2 micro-batches go through both;
                    stage 2   . . 0 1 . a . b 2 . 3 . . c . d . .  (chunks * own stages + devices - 1) * (forward +
                    stage 3   . . . 0 a 1 b . . . . 2 c 3 d . . .  backward of a stage)

Steps in a row overlap: a device begins the next when its own part of this one is over, its optimizer (o) included.
Under zero-bubble, with 2 S - 1 micro-batches or more, equal stages then never wait. Here a step takes 11 units of time
alone, and 10 in a row::

    zero-bubble     stage 0   0 1 2 a A b B c C o 0 1 2 a A b B c C o .
                    stage 1   . 0 a 1 b 2 c A B C o 0 a 1 b 2 c A B C o

``plan`` gives the order, ``simulate`` the exact timeline of one step or of several, transfers included, ``in_a_row_ms``
what each of many takes.
"""

from __future__ import annotations

from placer.schedule.in_a_row import in_a_row_ms
from placer.schedule.orders import in_flight, merged, plan, roomy_plans
from placer.schedule.passes import (
    Pass,
    Phase,
    Pipeline,
    Plan,
    Timeline,
    TimelineTask,
    TimelineTransfer,
    Transfer,
)
from placer.schedule.simulate import simulate, step_ms

__all__ = [
    "Pass",
    "Phase",
    "Pipeline",
    "Plan",
    "Timeline",
    "TimelineTask",
    "TimelineTransfer",
    "Transfer",
    "in_a_row_ms",
    "in_flight",
    "merged",
    "plan",
    "roomy_plans",
    "simulate",
    "step_ms",
]
