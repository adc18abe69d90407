"""The commands and snippets of the pages: they parse, name what there is, and the main ones run."""

import ast
import importlib.util
import inspect
import json
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest
from click.exceptions import NoArgsIsHelpError
from click.testing import CliRunner
from fakes import FakeEngine, StartWorker
from openai import OpenAI
from servers import answer_any, run_server

import mlx_rq
from mlx_rq.api_stub.settings import Settings
from mlx_rq.engine.interface import Task
from mlx_rq.jobs.openai.kinds import KINDS
from mlx_rq.worker.cli.main import main
from mlx_rq.worker.cli.models import asked_models

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`([^`\n]*\bmlx-rq [^`\n]+)`")

BODY_FIELDS = {field for kind in KINDS.values() for field in kind.model_fields}
ELLIPSIS = "…"
"""What is the reader's own."""


def blocks(page: Path, *languages: str) -> list[str]:
    """The blocks of code in some languages, without their indentation."""
    return [
        inspect.cleandoc(code) if indent else code
        for indent, language, code in BLOCK.findall(page.read_text())
        if language in languages
    ]


def each(*languages: str) -> list[Any]:
    """A case for each block of the pages."""
    return [
        pytest.param(code, id=f"{page.relative_to(ROOT)}-{number}")
        for page in PAGES
        for number, code in enumerate(blocks(page, *languages), start=1)
    ]


def commands(text: str) -> Iterator[list[str]]:
    """The arguments of each call of `mlx-rq` in lines for a shell."""
    lines = re.sub(r"\\\n\s*", " ", text)
    for line in [*re.findall(r"\$\(([^)]*)\)", lines), *lines.splitlines()]:
        if "mlx-rq " not in line or "$(mlx-rq" in line or "│" in line:
            continue
        words = shlex.shlex(line, posix=True, punctuation_chars=True)
        words.whitespace_split = True
        before: str | None = None
        call: list[str] | None = None
        for word in words:
            if call is not None and not re.fullmatch(r"[|&;<>()]+", word):
                call.append(word)
            elif call is not None:
                break
            elif word == "mlx-rq" and (before in (None, "|", "pip") or "=" in str(before)):
                call = []
            before = word
        if call:
            yield [word for word in call if word != ELLIPSIS]


@pytest.fixture
def any_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], None]:
    """Has a file of each name that a command might read."""
    monkeypatch.chdir(tmp_path)

    def there(words: list[str]) -> None:
        for word in words:
            if re.fullmatch(r"[a-z][\w.-]*", word):
                (tmp_path / word).touch()

    return there


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], None]:
    """Raises click's error where the program would refuse its words; runs nothing."""
    parsed: list[click.Context] = []
    monkeypatch.setattr(click.Command, "invoke", lambda _, context: parsed.append(context))

    def parse_(arguments: list[str]) -> None:
        main.main(list(arguments), prog_name="mlx-rq", standalone_mode=False)
        last = parsed[-1]
        if last.command_path == "mlx-rq service install" and last.params["command"]:
            parse_(list(last.params["command"]))

    return parse_


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_are_ones_that_the_program_takes(
    page: Path, any_file: Callable[[list[str]], None], parse: Callable[[list[str]], None]
) -> None:
    for code in blocks(page, "", "sh"):
        for arguments in commands(code):
            any_file(arguments[1:])
            parse(arguments)
    for code in INLINE.findall(BLOCK.sub("", page.read_text())):
        for arguments in commands(code):
            any_file(arguments[1:])
            # A command, or an option, may be only named, or a group of commands.
            with suppress(click.MissingParameter, click.BadOptionUsage, NoArgsIsHelpError):
                parse(arguments)


def test_commands_are_found_wherever_they_stand(parse: Callable[[list[str]], None]) -> None:
    text = (
        "git diff | mlx-rq submit - --system 'a b'\n"
        'eval "$(mlx-rq completion bash)"   # bash\n'
        "RQ_REDIS_URL=$(mlx-rq url) rq info\n"
        "mlx-rq batch a.jsonl \\\n    -o b.jsonl > log # why\n"
        "make -C mlx-rq lint\npip install mlx-rq\n"
    )
    assert sorted(commands(text)) == [
        ["batch", "a.jsonl", "-o", "b.jsonl"],
        ["completion", "bash"],
        ["submit", "-", "--system", "a b"],
        ["url"],
    ]
    with pytest.raises(click.NoSuchOption):
        parse(["submit", "Hi", "--wiat"])
    with pytest.raises(click.UsageError, match="No such command"):
        parse(["sumbit", "Hi"])


def tree_of(code: str) -> ast.Module:
    """Parses a block of Python, in which `…` may stand for anything."""
    return ast.parse(re.sub(rf"(?<![\w'\"]){ELLIPSIS}", "...", code))


@pytest.mark.parametrize("code", each("python"))
def test_python_names_what_there_is(code: str) -> None:
    """Names of mlx_rq and their arguments, and calls of OpenAI's client."""
    known: dict[str, Any] = {"mlx_rq": mlx_rq, "submit": mlx_rq.submit}
    if re.search(r"^client = OpenAI\(", code, re.MULTILINE):
        known["client"] = OpenAI(api_key="any")
    tree = tree_of(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "mlx_rq":
            known |= {alias.name: getattr(mlx_rq, alias.name) for alias in node.names}
    for node in ast.walk(tree):
        called = found(node.func, known) if isinstance(node, ast.Call) else None
        if called is None or not isinstance(node, ast.Call):
            continue
        given: dict[str, Any] = {one.arg: None for one in node.keywords if one.arg is not None}
        positional = [None for one in node.args if not isinstance(one, ast.Starred)]
        if not any(isinstance(one, ast.Constant) and one.value is ... for one in node.args):
            inspect.signature(called).bind_partial(*positional, **given)
        if called in (mlx_rq.submit, mlx_rq.map):
            parameters = inspect.signature(called).parameters
            assert given.keys() - parameters.keys() <= BODY_FIELDS


def found(node: ast.expr, known: dict[str, Any]) -> Callable[..., Any] | None:
    """What a dotted name stands for; None where it begins with a name that is not known."""
    if isinstance(node, ast.Attribute):
        owner = found(node.value, known)
        return None if owner is None else getattr(owner, node.attr)
    return known.get(node.id) if isinstance(node, ast.Name) else None


@pytest.mark.parametrize("code", each("json"))
def test_json_is_json(code: str) -> None:
    json.loads(code)


@pytest.mark.parametrize("code", each("toml"))
def test_configuration_is_taken(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file.toml"
    file.write_text(code)
    if "models" in tomllib.loads(code):
        assert asked_models((), (), file)
        return
    monkeypatch.setenv("MLX_RQ_CONFIG", str(file))
    assert CliRunner().invoke(main, ["config", "show"]).exit_code == 0


ANSWER = json.dumps({"name": "Ada Lovelace", "age": 36, "stars": 4, "review": "Good."})
GIVEN = {"words": ["sea"], "rows": [{"product": "teapot", "material": "porcelain"}]}


def json_answer(task: Task) -> dict[str, Any]:
    told = answer_any(task)
    if told["object"] == "chat.completion":
        told["choices"][0]["message"]["content"] = ANSWER
    return told


@pytest.fixture
def here(
    running_worker: StartWorker, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """The URL of a server beside a worker, in a folder with the files that pages speak of."""
    monkeypatch.chdir(tmp_path)
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"}
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    Path("requests.jsonl").write_text(json.dumps({**line, "body": body}) + "\n")
    Path("body.json").write_text(json.dumps(body))
    Path("products.csv").write_text("name\nteapot\n")
    with (
        running_worker(FakeEngine(answer_with=json_answer)),
        run_server(Settings(data_dir=tmp_path / "http", redis_url=redis_url)) as server,
    ):
        yield server.url


def runs_here(code: str) -> bool:
    """Whether a block is whole, and needs nothing that is not installed for tests."""
    modules = re.findall(r"^(?:from|import) (\w+)", code, re.MULTILINE)
    return ELLIPSIS not in code and all(map(importlib.util.find_spec, modules))


def test_python_runs(here: str, capsys: pytest.CaptureFixture[str]) -> None:
    """All blocks but those with gaps, and those of clients, which `make test-clients` runs."""
    ran = 0
    for page in PAGES:
        for code in filter(runs_here, blocks(page, "python")):
            url = re.sub(r"http://(127\.0\.0\.1|localhost):8000", here, code)
            module = ModuleType("snippet")  # where pydantic finds the types of annotations
            vars(module).update(GIVEN)
            exec(compile(url, f"{page.name}: {code}", "exec"), vars(module))
            ran += 1
    assert ran >= 7
    assert ANSWER in capsys.readouterr().out


def test_the_first_commands_run(here: str) -> None:
    """Those of the first page and of the README that submit, look and run files."""
    for page in (ROOT / "docs/index.md", ROOT / "README.md"):
        for arguments in (one for code in blocks(page, "") for one in commands(code)):
            if arguments[0] not in ("submit", "batch", "status", "url", "limits"):
                continue
            if arguments[0] == "batch":
                arguments = [*arguments, "--quiet"]
            done = CliRunner().invoke(main, arguments, input="a diff")
            assert done.exit_code == 0, (arguments, done.output)
            if "--wait" in arguments:
                assert done.stdout.strip() == ANSWER
    assert json.loads(Path("answers.jsonl").read_text())["custom_id"] == "a"
    assert Path("descriptions.csv").read_text().startswith("name,answer")
