"""A report on a step as one HTML page that opens from disk: see ``render``.

``data`` says what the page knows of a step, as plain lists and numbers; ``lines``, ``memory``, ``timeline`` and
``parameters`` are its parts, ``pipeline`` what pipeline stages add.  ``render`` puts that, and the files of ``static``,
into one file.  Nothing here decides or computes what a step costs: that is asked of the plan and the analyses that it
is made of.
"""

from graphzero.plugins.page.data import plan_data, save_page
from graphzero.plugins.page.render import render

__all__ = ["plan_data", "render", "save_page"]
