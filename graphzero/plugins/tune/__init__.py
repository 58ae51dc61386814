"""Search for the fastest layout of a step on a machine, among those that fit.

``captured_step`` puts a step that was captured once on any ranks; ``layout`` says what there is to choose; ``price``
compiles a layout and models its seconds, or says what it takes at least.  ``groups`` finds weights that can be split
together, ``proposal`` which of them are worth it.  ``search`` decides what is priced, ``report`` says it in words,
``patterns`` names weights.
"""
