"""Schedules as data: the order in which stages run micro-batches, how many they hold, and how long
a step takes.

A step of 3 stages and 4 micro-batches. Digits are forward passes, letters backward passes (a belongs to 0); each takes
one unit of time::

    fill-drain      stage 0   0 1 2 3 . . . . a b c d      all forward passes, then all backward passes (GPipe);
                    stage 1   . 0 1 2 3 . . a b c d .      every stage holds 4 micro-batches
                    stage 2   . . 0 1 2 3 a b c d . .

    1f1b            stage 0   0 1 2 . . a 3 b . c . d      stage p of S first runs S - 1 - p forward passes, then one
                    stage 1   . 0 1 . a 2 b 3 c . d .      forward and one backward in turn, then the backward passes
                    stage 2   . . 0 a 1 b 2 c 3 d . .      that are left; it holds S - p micro-batches

Both take (chunks + stages - 1) * (forward + backward) where stages are equal and transfers free.

``zero-bubble`` splits a backward pass: the input-gradient pass (letters), for which the stage before waits, and the
weight-gradient pass (capitals), for which no stage waits, so that it can fill a bubble. Each takes one unit here. A
stage holds a micro-batch from its forward pass to its weight-gradient pass, and has room for a number of them. The more
room, the smaller the bubble::

    room 2 S        stage 0   0 1 2 3 . a A b B c C d D .  the most of use (2 S, or all micro-batches): no wait but for
                    stage 1   . 0 1 2 a 3 b A c B d C D .  filling the pipeline (ZB-H2)
                    stage 2   . . 0 a 1 b 2 c 3 d A B C D

    room S          stage 0   0 1 2 . . a A 3 b B c C . d D     as much as the first stage has under 1f1b
                    stage 1   . 0 1 2 a A b B c 3 C . d D .     (ZB-H1)
                    stage 2   . . 0 a 1 b 2 c A B 3 d C D .

    room S - p      stage 0   0 1 2 . . a A 3 b B . c C . d D   as much as each stage has under 1f1b, the least: a stage
                    stage 1   . 0 1 . a A 2 b B 3 c C . d D .   runs a weight-gradient pass before the next forward
                    stage 2   . . 0 a A 1 b B 2 c C 3 d D . .   pass, but still after it has sent gradients back

    1f1b            stage 0   0 1 2 . . . . a a 3 b b . c c . d d   the same passes, not split
                    stage 1   . 0 1 . . a a 2 b b 3 c c . d d . .
                    stage 2   . . 0 a a 1 b b 2 c c 3 d d . . . .

What a stage keeps of each micro-batch that it holds, and once for several or all of them::

    fill-drain, 1f1b    each: activations, inputs and results;    once: what a backward pass works in
    zero-bubble         each: the same;    once for each weight-gradient pass that may be put off: what the
                        input-gradient pass works in, or leaves to it;    once: what a weight-gradient pass works in

With room S - p a stage puts off no weight-gradient pass beyond its next input-gradient pass, so
that ``zero-bubble`` takes about the memory of 1f1b. Each micro-batch more takes its activations,
and lets one more weight-gradient pass be put off (``sharing``): a stage needs S - p micro-batches
in flight to have work until gradients come back, and more of them only for weight-gradient passes
to fill bubbles with. A lower bound on these passes would save what they leave, but leave the room
unused; a higher one would take memory for passes that are never put off.

With several stages on a device, here 4 on 2, filling takes less::

    interleaved     stage 0   0 1 . . 2 . 3 . . a . b . . . . c d  stages 0 and 2 are on one device, 1 and 3 on the
                    stage 1   . 0 1 . . . . 2 a 3 b . . . . c d .  other: rounds of 2 micro-batches go through both;
                    stage 2   . . 0 1 . a . b 2 . 3 . . c . d . .  (chunks * own stages + devices - 1) * (forward +
                    stage 3   . . . 0 a 1 b . . . . 2 c 3 d . . .  backward of a stage)

Steps in a row overlap: a device begins the next when its own part of this one is over, its optimizer (o) included.
Under zero-bubble, with room for 2 S micro-batches and at least 2 S - 1 of them, equal stages then never wait. Here a
step takes 11 units of time alone, and 10 in a row::

    zero-bubble     stage 0   0 1 2 a A b B c C o 0 1 2 a A b B c C o .
                    stage 1   . 0 a 1 b 2 c A B C o 0 a 1 b 2 c A B C o

``plan`` gives the order, ``simulate`` the exact timeline of one step or of several, transfers
included, ``in_a_row_ms`` what each of many takes.

Source: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024 (ZB-H1, ZB-H2).
"""

from __future__ import annotations

from placer.schedule.orders import in_flight, least_in_flight, merged, plan, roomy_plans, sharing
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
from placer.schedule.steady_state import in_a_row_ms

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
    "least_in_flight",
    "merged",
    "plan",
    "roomy_plans",
    "sharing",
    "simulate",
    "step_ms",
]
