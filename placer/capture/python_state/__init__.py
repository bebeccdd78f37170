"""The Python state that a model's code reads and writes, which a captured graph cannot see.

    forward reads                               module                Placer's reaction
      attributes of modules and objects         attribute_reads       capture again when they change
      variables of files, class attributes      global_variables      capture again when they change
      values of unregistered tensors            plain_tensors         capture again when they change
      the host's random numbers                 host_rng              refuse the capture
    forward writes
      attributes of modules and objects         module_side_effects   restore, or refuse the capture
      variables of files                        global_variables      restore, or refuse the capture
      its inputs                                mutable_inputs        repeat it after each call
      parameters and unregistered tensors       tensor_writes         restore after a trial run
    around forward
      hooks of modules                          module_hooks          refuse the capture

Trial runs (isolated_runs, comparable_runs) use these modules to leave no trace.
"""
