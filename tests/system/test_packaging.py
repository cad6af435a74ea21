"""The package as others get it: installed, installed editable, and from a built wheel."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from paths import ROOT

SOURCES = ["graphshard", "passes", "pyproject.toml", "README.md", "LICENSE"]

# Runs in the throw-away environment, away from the sources.
PROBE = """
import importlib, importlib.util, json, pkgutil
import graphshard, graphshard.passes

modules = sorted(
    module.name
    for module in pkgutil.walk_packages(graphshard.__path__, "graphshard.")
    if module.name != "graphshard.__main__"
)
for name in modules:
    importlib.import_module(name)
print(json.dumps({
    "file": graphshard.__file__,
    "modules": modules,
    "top_level_passes": importlib.util.find_spec("passes") is not None,
}))
"""


def run(*command: str | Path, cwd: Path) -> str:
    """The command's output; its errors in the failure when it fails."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PIP_CONSTRAINT")}
    result = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of what a release holds: building in the working tree would leave files there."""
    copy = tmp_path / "source"
    copy.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            skipped = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=skipped)
        else:
            shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """An empty environment that sees this one's torch; its folder."""
    path = tmp_path / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", path, cwd=tmp_path)
    # Unlike a .pth of this environment's own, a path named here has none of its .pth files run, so
    # an editable graphshard of this environment stays invisible.
    (site_packages(path) / "host.pth").write_text(sysconfig.get_path("purelib"))
    return path


def site_packages(venv: Path) -> Path:
    return Path(sysconfig.get_path("purelib", vars={"base": str(venv), "platbase": str(venv)}))


def pip(venv: Path, *arguments: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "--python", venv / "bin" / "python", *arguments]
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    run(*command, *offline, cwd=venv)


def probe(venv: Path) -> dict[str, object]:
    elsewhere = venv.parent / "elsewhere"
    elsewhere.mkdir()
    return json.loads(run(venv / "bin" / "python", "-c", PROBE, cwd=elsewhere))


def expected_modules() -> list[str]:
    names = set()
    for top, folder in (
        ("graphshard", ROOT / "graphshard"),
        ("graphshard.passes", ROOT / "passes"),
    ):
        for file in folder.rglob("*.py"):
            if file.stem != "__main__":
                parts = [*file.relative_to(folder).parent.parts, file.stem]
                names.add(".".join([top, *(p for p in parts if p != "__init__")]))
    return sorted(names - {"graphshard"})


def check_installed(venv: Path, *, home: Path) -> None:
    seen = probe(venv)
    assert Path(str(seen["file"])).is_relative_to(home.resolve())
    assert seen["modules"] == expected_modules()
    assert not seen["top_level_passes"]
    assert not [p.name for p in site_packages(venv).iterdir() if p.name.startswith("passes")]
    script = venv / "bin" / "graphshard"
    assert "plan" in run(script, "--help", cwd=venv)


@pytest.mark.slow
def test_sdist(venv: Path, source: Path, tmp_path: Path) -> None:
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    run(sys.executable, "-c", build, cwd=source)
    (archive,) = tmp_path.glob("graphshard-*.tar.gz")
    pip(venv, "install", archive)
    check_installed(venv, home=site_packages(venv))
    installed = site_packages(venv) / "graphshard"
    for name in ("py.typed", "hardware/presets.toml", "report/page.js"):
        assert (installed / name).read_bytes() == (ROOT / "graphshard" / name).read_bytes()


@pytest.mark.slow
def test_pip_install_editable(venv: Path, source: Path) -> None:
    pip(venv, "install", "-e", source)
    check_installed(venv, home=source)


@pytest.mark.slow
def test_wheel(venv: Path, source: Path, tmp_path: Path) -> None:
    pip(venv, "wheel", source, "--wheel-dir", tmp_path / "dist")
    (wheel,) = (tmp_path / "dist").glob("graphshard-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"graphshard", names[-1].split("/")[0]}
    assert "graphshard/py.typed" in names
    assert "graphshard/passes/__init__.py" in names
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    pip(venv, "install", wheel)
    check_installed(venv, home=site_packages(venv))


@pytest.mark.slow
def test_packages_load_when_they_are_asked_for() -> None:
    script = (
        "import sys, graphshard\n"
        "assert not {'transformers', 'accelerate', 'peft', 'lightning'} & set(sys.modules)\n"
        "assert graphshard.hf.ShardedTrainer and graphshard.lightning.GraphShardStrategy\n"
        "assert graphshard.calibrate.__doc__ and not hasattr(graphshard, 'nothing')\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT, timeout=120)


def test_every_module_imports_with_the_core_dependencies_alone() -> None:
    """Whatever brings numpy along, the product does not need it."""
    script = (
        "import sys, pkgutil, importlib\n"
        "sys.modules['numpy'] = None\n"
        "import graphshard\n"
        "for found in pkgutil.walk_packages(graphshard.__path__, 'graphshard.'):\n"
        "    foreign = ('lightning', 'graphshard.hf', 'report.figures', '__main__')\n"
        "    if not any(name in found.name for name in foreign):\n"
        "        importlib.import_module(found.name)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT, timeout=120)
