"""Which program a call runs, alike on all ranks: arguments read, keys, captures and programs kept.

Binding and running a program are the runtime's; the order of all of it is the Graph's.
"""
