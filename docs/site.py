"""Makes a site of the pages: code that they link to becomes pages, too (a hook of mkdocs).

The pages are written to be read in the repository, where `../jobs/queue/keys.py` is a file. Each
file of the code that a page links to is a page of the site, `code/jobs/queue/keys.py.md`. What
stands at the top of the repository for people comes in as well, and the help of all commands.
"""

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from posixpath import join, normpath, relpath
from typing import Any

import click
import griffe
from mkdocs.structure.files import File, Files

logger = logging.getLogger("mkdocs.hooks.site")

ROOT = Path(__file__).parent.parent
FROM_THE_TOP = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
WIDE = ("architecture.md",)
"""Pages whose pictures need the room of the table of contents."""

LANGUAGES = {".py": "python", ".lua": "lua", ".mjs": "javascript", ".yml": "yaml", ".toml": "toml"}

CLI = "reference/cli.md"
_HELP_WIDTH = 80

_FIELD = re.compile(r"^(?=\w+(?:, \w+)*: |[A-Z][a-z]+[A-Z]\w+ (?:\(.*?\) )?where )", re.MULTILINE)
"""Where the description of a parameter, or of an error, begins."""

_LINK = re.compile(r"(\]\()(?!https?:|#)([^)#\s]+)")
_NAMED_BY_FILE = re.compile(r"(?<=\[)(?:docs/)?([\w/-]+\.md)(?=\]\()")
_OUTSIDE = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=["']?https?://[^>]*>""")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages from the top of the repository, and the code that pages link to."""
    texts = {
        file.src_uri: (ROOT / "docs" / file.src_uri).read_text()
        for file in files.documentation_pages()
    }
    if (written := files.get_file_from_path(CLI)) is not None:
        files.remove(written)
    files.append(File.generated(config, CLI, content="".join([texts[CLI], *_commands()])))
    for uri, source in FROM_THE_TOP.items():
        texts[uri] = (ROOT / source).read_text()
        files.append(File.generated(config, uri, content=texts[uri]))
    for uri, text in texts.items():
        for _, link in _LINK.findall(text):
            page = _page_of(_in_repository(uri, link))
            if page is not None and files.get_file_from_path(page[0]) is None:
                files.append(File.generated(config, page[0], content=_shown(page[1])))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turns links into the repository into links into the site."""
    uri: str = page.file.src_uri

    def link(found: re.Match[str]) -> str:
        path = _in_repository(uri, found[2])
        to = _page_of(path)
        site_path = path.removeprefix("docs/") if to is None else to[0]
        by_source = {source: name for name, source in FROM_THE_TOP.items()}
        site_path = by_source.get(site_path, site_path)
        return found[1] + relpath(site_path, Path(uri).parent.as_posix())

    if uri.startswith("code/"):
        return markdown
    if uri in WIDE:
        page.meta["hide"] = ["toc"]
    return _NAMED_BY_FILE.sub(_titled, _LINK.sub(link, markdown))


def _titled(named: re.Match[str]) -> str:
    """Names a page by its title instead of its file's name."""
    file = ROOT / "docs" / named[1]
    return file.read_text().partition("\n")[0].removeprefix("# ") if file.exists() else named[0]


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Warns of what a reader's browser would get from elsewhere."""
    for found in _OUTSIDE.findall(output):
        if 'rel="canonical"' not in found:
            logger.warning("%s asks the internet for something: %s", page.file.src_uri, found)
    return output


class DocstringFields(griffe.Extension):
    """Makes a list of the parameters that a docstring describes, each at the begin of a line."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = re.sub(_FIELD, "- ", obj.docstring.value)
            obj.docstring.value = re.sub(r"(?m)^(?!- |    )(.+)\n(?=- )", r"\1\n\n", text)


def _commands() -> Iterator[str]:
    """Yields the help of each command, as it prints it itself."""
    from mlx_rq.worker.cli.main import main

    todo: list[click.Context] = [click.Context(main, info_name="mlx-rq", **main.context_settings)]
    while todo:
        context = todo.pop(0)
        context.terminal_width = context.max_content_width = _HELP_WIDTH
        if isinstance(context.command, click.Group):
            todo[:0] = [
                click.Context(context.command.commands[name], info_name=name, parent=context)
                for name in context.command.list_commands(context)
                if not context.command.commands[name].hidden
            ]
        yield f"\n## {context.command_path}\n\n~~~~~~text\n{context.get_help()}\n~~~~~~\n"


def _in_repository(uri: str, link: str) -> str:
    """Gives the path, from the top of the repository, of what a page links to."""
    source = FROM_THE_TOP.get(uri, f"docs/{uri}")
    return normpath(join(Path(source).parent.as_posix(), link))


def _page_of(path: str) -> tuple[str, Path] | None:
    """Gives the page that shows a file of the code, and the file; None for what is no code."""
    file = ROOT / path
    if path.startswith(("docs/", "../")) or path in FROM_THE_TOP.values() or not file.is_file():
        return None
    return f"code/{path}.md", file


def _shown(file: Path) -> str:
    name = file.relative_to(ROOT).as_posix()
    text = file.read_text()
    if file.suffix == ".md":
        return text
    language = LANGUAGES.get(file.suffix, "text")
    head = "---\nhide: [toc]\nsearch:\n  exclude: true\n---\n"
    return f"{head}# {name}\n\n~~~~~~{language}\n{text}~~~~~~\n"
