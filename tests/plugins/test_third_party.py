"""A distribution of others adds to each extension point that docs/plugins.md shows, and graphzero stays as it is."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys

from distributions import install

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
USE = """
import contextlib, io, json, sys
import graphzero as gz
import torch
before = "graphzero_dtypes" in sys.modules, "graphzero.extensions" in sys.modules
ranks = gz.placement("cpu", range(2), virtual=True)
config = gz.GraphConfig.from_recipe({"zero": 2, "float64": False, "epochs": 3}, ranks)
from train import Train
graph = Train(ranks)
graph.compile(torch.ones(2, 4))
without = [record.name for record in graph.history]
graph.config.allow_float64 = False
graph.compile(torch.ones(2, 4))
tight = Train(ranks)
tight.config.enable_zero(stage=2)
tight.config.set_memory_budget(1000)
tight.compile(torch.ones(2, 4))
printed = io.StringIO()
from graphzero.cli import main
with contextlib.redirect_stdout(printed):
    status = main(["dtypes", "train.py:make", "--ranks", "2"])
    main(["opt", "--list"])
print(json.dumps({
    "before": before, "recipe": config.recipe, "stage": config.zero.stage, "allow": config.allow_float64,
    "without": without, "passes": [record.name for record in graph.history], "status": status,
    "plan": (tight.plan.memory.peak, tight.plan.decisions),
    "printed": printed.getvalue(), "members": [name for name in dir(config) if "float64" in name or name == "recipe"],
}))
"""


def block(first: str) -> str:
    """The block of the page that begins with a line."""
    found = re.search(rf"^```\w+\n({re.escape(first)}\n.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def test_a_package_of_others_adds_one_of_each_and_graphzero_stays_as_it_is(tmp_path: pathlib.Path) -> None:
    declared: dict[str, dict[str, str]] = {}
    for line in block("[project]").splitlines():
        if point := re.match(r'\[project.entry-points."(.*)"\]', line):
            entries = declared.setdefault(point[1], {})
        elif declared and (entry := re.match(r'(\w+) = "(.*)"', line)):
            entries[entry[1]] = entry[2]
    modules = {"graphzero_dtypes": block("# graphzero_dtypes.py"), "train": block("# train.py")}
    install(tmp_path, "graphzero-dtypes", modules, declared)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", USE], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["before"] == [False, False]
    assert (found["recipe"], found["stage"], found["allow"]) == ({"epochs": 3}, 2, False)
    assert found["members"] == ["allow_float64", "recipe"]
    assert "refuse_float64" not in found["without"]
    assert [name for name in found["passes"] if name != "refuse_float64"] == found["without"]
    assert found["passes"].index("refuse_float64") == found["passes"].index("pin") + 1  # stage 0 has no pass zero
    assert found["plan"][0] <= 1000 and found["plan"][1][0].startswith("each value is a bucket of its own")
    assert found["status"] == 0 and "torch.float32" in found["printed"]
    assert re.search(r"^refuse_float64 +captured +Raises ConfigError", found["printed"], re.MULTILINE)
