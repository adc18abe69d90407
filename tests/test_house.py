"""The house: which module may import which. Reads the sources, imports none of them."""

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("jobs", "engine", "worker", "api_stub")

# What a folder may import beside itself; the longest name that fits a module is its folder.
MAY_IMPORT = {
    "mlx_rq.files": (),
    "mlx_rq.jobs.openai": (),
    "mlx_rq.jobs.queue": ("mlx_rq.jobs.openai",),
    "mlx_rq.jobs.client": ("mlx_rq.jobs.queue", "mlx_rq.jobs.openai"),
    "mlx_rq.jobs.batch": ("mlx_rq.jobs.client", "mlx_rq.jobs.queue", "mlx_rq.jobs.openai"),
    "mlx_rq.engine": ("mlx_rq.jobs.openai",),
    "mlx_rq.worker.cli": ("mlx_rq",),
    "mlx_rq.worker": ("mlx_rq.engine", "mlx_rq.jobs"),
    "mlx_rq.api_stub": ("mlx_rq.jobs",),
}
ALL_MAY_IMPORT = "mlx_rq.files"


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("mlx_rq", *parts)).removesuffix(".__init__")


MODULES: Mapping[str, Path] = {
    "mlx_rq.files": ROOT / "mlx_rq" / "files.py",
    **{name_of(path): path for room in ROOMS for path in (ROOT / room).rglob("*.py")},
}


def imports(path: Path) -> Iterator[str]:
    """Names the modules of ours that a module imports, also inside its functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name for alias in node.names if (name := alias.name) in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [name for name in inner if name in MODULES]
            yield from found or ([node.module] if node.module in MODULES else ())


IMPORTS = {name: set(imports(path)) - {name} for name, path in MODULES.items()}


def is_in(module: str, folder: str) -> bool:
    return f"{module}.".startswith(f"{folder}.")


def folder_of(module: str) -> str | None:
    return max((folder for folder in MAY_IMPORT if is_in(module, folder)), key=len, default=None)


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert len(IMPORTS) > 150, "the sources were found"
    try:
        TopologicalSorter(IMPORTS).prepare()
    except CycleError as error:
        raise AssertionError(" → ".join(error.args[1])) from None


def test_imports_go_down_only() -> None:
    wrong = [
        f"{module} imports {imported}"
        for module, all_imported in IMPORTS.items()
        if (folder := folder_of(module)) is not None
        for imported in all_imported
        if not any(is_in(imported, may) for may in (folder, *MAY_IMPORT[folder], ALL_MAY_IMPORT))
    ]
    assert wrong == []
