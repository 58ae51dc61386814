"""Which program a call runs, alike on all ranks: arguments read, keys, captures and programs kept.

How tensors are bound and ops run is the runtime's; ``steps`` has the order of a step.
"""
