"""The engine: stages, their slots, and the passes that run in them.

    plan       F0 of stage 0, F1 of stage 0, F0 of stage 1, ...     the order of the passes
                 │
    engine       │ waits, runs a pass, marks its end, sends what it made
                 ▼
    stage 0 on cuda:0                        stage 1 on cuda:1
    ┌─────────────────────────────┐          ┌─────────────────────────────┐
    │ slot 0  inputs ▶ F ▶ outputs ├──copy──▶│ slot 0  inputs ▶ F ▶ outputs │ micro-batch 0, 2, ...
    │ slot 1  inputs ▶ F ▶ outputs ├──copy──▶│ slot 1  inputs ▶ F ▶ outputs │ micro-batch 1, 3, ...
    └─────────────────────────────┘          └─────────────────────────────┘

A *stage* is a segment of the model on one device. A *slot* is static memory for one micro-batch in
a stage, with the passes that work in it: forward (F) and, in training, backward and weight-gradient
passes. On a GPU each pass of a slot is a CUDA graph once it is recorded. A *plan*
(``placer.schedule.Plan``) orders the passes. The *engine* issues them.

==================  ========================  ==============================  ==================
use                 order of passes           slots of a stage                passes
==================  ========================  ==============================  ==================
training            the plan of a schedule    as many as the plan has         recorded at the
                                              micro-batches in flight there   first batch
streams, and        the oldest batch first    one more than the distance to   recorded when a
recorded calls                                the stage that made a value     shape comes again
eager calls         the plan of fill-drain,   one for each micro-batch        not recorded
                    forward passes alone
==================  ========================  ==============================  ==================
"""
