"""What ``make dist`` makes is the whole package: in an empty environment it trains, and has its command."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("graphzero", "pyproject.toml", "setup.cfg", "README.md", "LICENSE")
SCRIPT = """
import runpy, sys
from importlib.metadata import distribution
import torch
import graphzero as gz

where = sys.prefix
installed = str(distribution("graphzero-torch").locate_file(""))
assert gz.__file__.startswith(where) and installed.startswith(where), gz.__file__


class Train(gz.Graph):
    def __init__(self):
        super().__init__(gz.placement("cpu", range(2), virtual=True))
        self.model = torch.nn.Linear(4, 4)
        self.add_optimizer(torch.optim.AdamW(self.model.parameters(), lr=1e-3))
        self.config.enable_zero(stage=3)

    def build(self, x):
        loss = self.model(x).square().mean()
        loss.backward()
        return loss


graph, x = Train(), torch.ones(2, 4)
first, second = graph(x), graph(x)
assert second < first
print(graph.history[0].before, file=open("step.txt", "w"))
sys.argv = ["graphzero", "opt", "step.txt", "--passes", "pin,zero{stage=2}"]
runpy.run_path(f"{where}/bin/graphzero", run_name="__main__")
"""


def run(*command: object, cwd: Path) -> str:
    done = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def copy_sources(folder: Path) -> None:
    """All that a build needs."""
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as ``make dist`` does, beside the source tree: first the sdist, then the wheel of it."""
    folder = tmp_path_factory.mktemp("dist")
    copy_sources(folder)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist", cwd=folder)
    assert len(list((folder / "dist").glob("*.tar.gz"))) == 1
    (found,) = (folder / "dist").glob("*.whl")
    return found


def test_the_wheel_says_its_license_and_has_its_text(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        texts = {Path(name).name: packed.read(name).decode() for name in packed.namelist() if ".dist-info/" in name}
    assert texts["LICENSE"] == (ROOT / "LICENSE").read_text()
    assert "License: Apache-2.0" in texts["METADATA"] or "License-Expression: Apache-2.0" in texts["METADATA"]


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"])
def test_links_of_pages_beside_the_readme_lead_to_files(page: str) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", (ROOT / page).read_text())
    assert links or page == "SECURITY.md"
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_an_editable_install_is_a_path_that_type_checkers_follow(tmp_path: Path) -> None:
    copy_sources(tmp_path)
    build = "import setuptools.build_meta as backend; backend.build_editable('.')"
    run(sys.executable, "-c", build, cwd=tmp_path)
    (wheel,) = tmp_path.glob("graphzero_torch-*.whl")
    with zipfile.ZipFile(wheel) as packed:
        (path,) = (packed.read(name) for name in packed.namelist() if name.endswith(".pth"))
    assert path.decode().strip() == str(tmp_path)


def test_beside_the_package_of_others_that_is_imported_by_the_same_name_it_says_so(tmp_path: Path) -> None:
    (tmp_path / "graphzero-0.2.0.dist-info").mkdir()
    (tmp_path / "graphzero").mkdir()
    shutil.copy(ROOT / "graphzero" / "__init__.py", tmp_path / "graphzero")
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.path.insert(0, '.'); import graphzero"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "ImportError" in done.stderr
    assert "pip uninstall graphzero graphzero-torch" in done.stderr


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "graphzero").rglob("*") if path.is_file()}
    files = {name for name in files if "__pycache__" not in name}
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert "graphzero/py.typed" in packed
    assert packed == files, "[options.package_data] of setup.cfg says which files beside modules are packed"


@pytest.mark.slow
def test_in_an_empty_environment_the_wheel_trains_and_has_its_command(wheel: Path, tmp_path: Path) -> None:
    """Empty but for torch, which would take gigabytes: folders in a .pth file are searched, their own are not read."""
    empty = tmp_path / "empty"
    venv.create(empty, with_pip=False)
    python = empty / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", wheel, cwd=tmp_path)
    (folder,) = empty.glob("lib/python*/site-packages")
    (folder / "others.pth").write_text(sysconfig.get_path("purelib"))
    printed = run(python, "-I", "-c", SCRIPT, cwd=tmp_path)
    assert "S(0)!" in next(line for line in printed.splitlines() if "state(model.weight, exp_avg)" in line)
