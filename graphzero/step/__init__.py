"""Selection of the program for a call, equal on all ranks: arguments, keys, cached captures and programs.

How tensors are bound and ops run is the runtime's; ``steps`` has the order of a step.
"""
