"""Schedules: the order of passes in a pipeline, the memory that they need, and their time.

A step of 3 stages and 4 micro-batches. Digits are forward passes, letters are backward passes (a
belongs to 0); each takes one unit of time::

    fill-drain      stage 0   0 1 2 3 . . . . a b c d      all forward passes, then all backward
                    stage 1   . 0 1 2 3 . . a b c d .      passes (GPipe); every stage holds 4
                    stage 2   . . 0 1 2 3 a b c d . .      micro-batches

    1f1b            stage 0   0 1 2 . . a 3 b . c . d      stage p of S runs S - 1 - p forward
                    stage 1   . 0 1 . a 2 b 3 c . d .      passes, then forward and backward in
                    stage 2   . . 0 a 1 b 2 c 3 d . .      turn; it holds S - p micro-batches

Both take (chunks + stages - 1) * (forward + backward) if stages are equal and transfers free.

``zero-bubble`` splits a backward pass. The previous stage waits for the input-gradient pass (small
letters). No stage waits for the weight-gradient pass (capitals), so it can fill a bubble. Each
takes one unit here. A stage holds a micro-batch from its forward pass to its weight-gradient pass.
It has room for a limited number of them; more room means a smaller bubble::

    room 2 S        stage 0   0 1 2 3 . a A b B c C d D .  the useful maximum (2 S, or all): idle
                    stage 1   . 0 1 2 a 3 b A c B d C D .  only while the pipeline fills (ZB-H2)
                    stage 2   . . 0 a 1 b 2 c 3 d A B C D

    room S          stage 0   0 1 2 . . a A 3 b B c C . d D     as much as the first stage has
                    stage 1   . 0 1 2 a A b B c 3 C . d D .     under 1f1b (ZB-H1)
                    stage 2   . . 0 a 1 b 2 c A B 3 d C D .

    room S - p      stage 0   0 1 2 . . a A 3 b B . c C . d D   as much as each stage has under
                    stage 1   . 0 1 . a A 2 b B 3 c C . d D .   1f1b, the minimum: forward passes
                    stage 2   . . 0 a A 1 b B 2 c C 3 d D . .   wait for weight-gradient passes

    1f1b            stage 0   0 1 2 . . . . a a 3 b b . c c . d d   the same passes, not split
                    stage 1   . 0 1 . . a a 2 b b 3 c c . d d . .
                    stage 2   . . 0 a a 1 b b 2 c c 3 d d . . . .

A stage keeps some memory for each micro-batch that it holds, and some only once::

    fill-drain, 1f1b    each micro-batch: activations, inputs and results
                        once: the workspace of a backward pass
    zero-bubble         each micro-batch: activations, inputs and results
                        each deferred weight-gradient pass: workspace and results of the
                        input-gradient pass
                        once: the workspace of a weight-gradient pass

With room S - p, a stage defers no weight-gradient pass beyond its next input-gradient pass, so
``zero-bubble`` takes about the memory of 1f1b. Each additional micro-batch takes its activations
and lets one more weight-gradient pass be deferred (``sharing``). A stage needs S - p micro-batches
in flight to stay busy until gradients come back; more of them only supply weight-gradient passes
for the bubbles. A smaller limit on deferred passes would save their memory but leave the room
unused. A larger limit would reserve memory for passes that are never deferred.

With several stages per device, here 4 on 2, the pipeline fills faster::

    interleaved     stage 0   0 1 . . 2 . 3 . . a . b . . . . c d  device 0 has stages 0 and 2,
                    stage 1   . 0 1 . . . . 2 a 3 b . . . . c d .  device 1 has stages 1 and 3;
                    stage 2   . . 0 1 . a . b 2 . 3 . . c . d . .  rounds of 2 micro-batches go
                    stage 3   . . . 0 a 1 b . . . . 2 c 3 d . . .  through both

This takes (chunks * own stages + devices - 1) * (forward + backward of a stage).

Consecutive steps overlap: a device begins the next step when its own part of this one is done, its
optimizer (o) included. Under zero-bubble, with room for 2 S micro-batches and at least 2 S - 1 of
them, equal stages never wait in steady state. Here an isolated step takes 11 units of time, and a
steady-state step 10::

    zero-bubble     stage 0   0 1 2 a A b B c C o 0 1 2 a A b B c C o .
                    stage 1   . 0 a 1 b 2 c A B C o 0 a 1 b 2 c A B C o

``plan`` returns the order, ``simulate`` the exact timeline of one or more steps with transfers, and
``steady_state_ms`` the steady-state time of a step.

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
from placer.schedule.steady_state import steady_state_ms

__all__ = [
    "Pass",
    "Phase",
    "Pipeline",
    "Plan",
    "Timeline",
    "TimelineTask",
    "TimelineTransfer",
    "Transfer",
    "in_flight",
    "least_in_flight",
    "merged",
    "plan",
    "roomy_plans",
    "sharing",
    "simulate",
    "steady_state_ms",
    "step_ms",
]
