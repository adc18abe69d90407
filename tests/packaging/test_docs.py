"""The pages for readers: every file, test and name that they mention is there."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGES = (
    *("README.md", "CONTRIBUTING.md"),
    *(page.relative_to(ROOT).as_posix() for page in ROOT.glob("docs/**/*.md")),
)
TOPS = ("api_stub", "bench", "docs", "engine", "jobs", "mlx_rq", "tests", "worker")
PATH = re.compile(rf"`((?:{'|'.join(TOPS)})/[\w./]*)((?:::\w+)*)`")
TEST = re.compile(r"`(?:test_\w+\.py|(?:test_|Test)\w+…?(?:\[[^\]`]*\])?)`")
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)")


def without_code(page: str) -> str:
    """The page's text without its blocks of code, which show what is the reader's own."""
    return re.sub(r"^ *```.*?^ *```", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)


def defined(nodes: list[ast.stmt]) -> Iterator[tuple[str, list[ast.stmt]]]:
    """The functions, classes and variables of a module or class, with what stands in each."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.body
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((target.id, []) for target in targets if isinstance(target, ast.Name))


def missing(path: str, name: str) -> str | None:
    """What of `path::Class::function` does not exist; None where all of it does."""
    if not (ROOT / path).exists():
        return path
    if not name:
        return None
    body = ast.parse((ROOT / path).read_text()).body
    for part in name.removeprefix("::").split("::"):
        found = dict(defined(body))
        if part not in found:
            return f"{path}{name}"
        body = found[part]
    return None


@pytest.mark.parametrize("page", PAGES)
def test_the_files_and_names_that_a_page_mentions_are_there(page: str) -> None:
    mentioned = PATH.findall(without_code(page))
    assert [gone for path, name in mentioned if (gone := missing(path, name))] == []


@pytest.mark.parametrize("page", PAGES)
def test_the_tests_that_a_page_mentions_by_name_alone_are_there(page: str) -> None:
    """`test_begins_so_…` stands for every test that begins so."""
    files = list(ROOT.glob("tests/**/*.py"))
    names = {file.name for file in files}
    for file in files:
        names |= set(re.findall(r"^ *(?:def|class) (\w+)", file.read_text(), flags=re.MULTILINE))
    for mentioned in TEST.findall(without_code(page)):
        wanted = mentioned.strip("`").partition("[")[0]
        begins = wanted.removesuffix("…")
        found = any(name.startswith(begins) for name in names) if wanted != begins else False
        assert found or wanted in names, mentioned


@pytest.mark.parametrize("page", PAGES)
def test_its_links_lead_somewhere(page: str) -> None:
    for target, anchor in LINK.findall(without_code(page)):
        file = (ROOT / page).parent / target if target else ROOT / page
        assert file.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)", file.read_text(), flags=re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", t).lower().replace(" ", "-") for t in titles}


def test_every_client_with_a_page_is_in_the_index() -> None:
    index = ROOT / "docs" / "clients" / "index.md"
    linked = {target for target, _ in LINK.findall(index.read_text())}
    assert {page.name for page in index.parent.glob("*.md")} - {"index.md"} <= linked


def test_every_folder_of_the_code_is_on_the_map() -> None:
    told = set(re.findall(r"^\| `([\w/]+/)`", (ROOT / "docs/architecture.md").read_text(), re.M))
    rooms = ("jobs", "engine", "worker", "api_stub")
    inits = [file for room in rooms for file in (ROOT / room).rglob("__init__.py")]
    assert {f"{file.parent.relative_to(ROOT)}/" for file in inits} <= told
