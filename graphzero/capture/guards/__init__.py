"""Guards: assumptions of a capture besides the key of its call, checked before each call that would run its program.

A call's key (``step/program_key.py``) guards structure, shapes and dtypes of the inputs, modules and their modes,
parameters, and torch's settings.  What else a capture depends on is known only after build has been traced, so it is
recorded then, as a ``GuardSet``, and ``GuardSet.check`` decides whether a program may run:

* ``guard_set``: hyperparameters and float inputs that decided a branch, and which optimizer states existed;
* ``attribute_guards``: attributes, globals, closure variables and variables of the environment that build read
  (``referenced_names`` finds the names, ``recorded_names`` sees reads by name in a dict, ``guarded_values`` makes
  values comparable, ``guarded_attributes`` reads them before a call).
"""
