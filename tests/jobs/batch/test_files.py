"""The output files and the state beside them: healed, never mixed up, in order at the end."""

import io
import json
import shutil
from pathlib import Path

import pytest
from batch_helpers import batch_line, batch_lines, line_count, read_jsonl, write_jsonl

from mlx_rq import RequestError
from mlx_rq.jobs.batch import files as batch_files
from mlx_rq.jobs.batch.compression import compress
from mlx_rq.jobs.batch.files import Outputs, PipedOutputs
from mlx_rq.jobs.batch.lines import BatchFile, Line
from mlx_rq.jobs.batch.records import Ended
from mlx_rq.jobs.batch.state import open_state
from mlx_rq.jobs.openai.errors import error_object


def source_of(tmp_path: Path, records: list[dict[str, object]]) -> BatchFile:
    return BatchFile(write_jsonl(tmp_path / "in.jsonl", records), "in.jsonl", {})


def answer_to(line: Line, text: str = "Hi.") -> Ended:
    return Ended(line, {"object": "chat.completion", "text": text}, "1" * 32)


def error_of(line: Line) -> Ended:
    return Ended(line, {"error": error_object("No.", code="invalid_value")}, "2" * 32)


def ids(path: Path) -> list[str]:
    return [record["custom_id"] for record in read_jsonl(path)]


@pytest.fixture
def outputs(tmp_path: Path) -> Outputs:
    return Outputs(tmp_path / "out.jsonl", tmp_path / "err.jsonl")


def again(outputs: Outputs) -> Outputs:
    """What the next run makes of the same files."""
    outputs.close()
    return Outputs(outputs.answers, outputs.errors)


class TestRecovery:
    def test_tells_which_lines_are_done(self, tmp_path: Path, outputs: Outputs) -> None:
        a, b, _ = source_of(tmp_path, batch_lines(3))
        assert outputs.append([answer_to(a), error_of(b)]) == [None, "invalid_value"]

        done = again(outputs).recover(ours=True)

        assert done.answered == {a.fingerprint}
        assert {print_: failure.code for print_, failure in done.failed.items()} == {
            b.fingerprint: "invalid_value"
        }
        assert done.failed[b.fingerprint].job_id == "2" * 32

    def test_a_last_line_torn_at_any_byte_is_cut_off(
        self, tmp_path: Path, outputs: Outputs
    ) -> None:
        a, b = source_of(tmp_path, batch_lines(2))
        outputs.append([answer_to(a)])
        first = outputs.answers.read_bytes()
        outputs.append([answer_to(b, "ü\u2028" * 20)])
        both = outputs.answers.read_bytes()

        for end in range(len(first), len(both)):
            outputs.answers.write_bytes(both[:end])
            done = again(outputs).recover(ours=True)
            assert done.answered == {a.fingerprint}
            assert outputs.answers.read_bytes() == first

        outputs.answers.write_bytes(both)
        assert again(outputs).recover(ours=True).answered == {a.fingerprint, b.fingerprint}

    def test_a_file_of_another_kind_is_refused_and_left_alone(self, outputs: Outputs) -> None:
        outputs.answers.write_text('{"mine": 1}\n')
        with pytest.raises(RequestError, match=r"out\.jsonl is there already, and its line 1"):
            outputs.recover(ours=False)
        assert outputs.answers.read_text() == '{"mine": 1}\n'

    @pytest.mark.parametrize("mine", ['{"mine": 1}', "notes", '{"mine": 1}\nnotes', "\0"])
    def test_without_a_last_newline_too(self, outputs: Outputs, mine: str) -> None:
        for path in (outputs.answers, outputs.errors):
            assert path is not None
            path.write_text(mine)
            with pytest.raises(RequestError, match="is there already, and its line"):
                outputs.recover(ours=False)
            assert path.read_text() == mine
            path.unlink()

    @pytest.mark.parametrize("ours", [True, False])
    @pytest.mark.parametrize("mine", ["notes\n", "notes", '{"id":"batch_req_1"}\nnotes\n'])
    def test_errors_into_another_file_are_refused_also_of_a_run_that_is_known(
        self, tmp_path: Path, outputs: Outputs, ours: bool, mine: str
    ) -> None:
        (a,) = source_of(tmp_path, batch_lines(1))
        outputs.append([answer_to(a)])
        notes = tmp_path / "err.jsonl"
        notes.write_text(mine)
        with pytest.raises(RequestError, match=r"err\.jsonl is there already"):
            again(outputs).recover(ours=ours)
        assert notes.read_text() == mine

    def test_answers_are_no_errors(self, tmp_path: Path, outputs: Outputs) -> None:
        (a,) = source_of(tmp_path, batch_lines(1))
        outputs.append([answer_to(a)])
        outputs.close()
        swapped = Outputs(tmp_path / "other.jsonl", outputs.answers)
        with pytest.raises(RequestError, match="its line 1 is an answer, not an error"):
            swapped.recover(ours=True)
        assert line_count(outputs.answers) == 1

    @pytest.mark.parametrize("damage", [b"\0\0\n", b"\0" * 100, b'{"id":"batch_req_0\0\n'])
    def test_errors_of_ours_may_be_damaged(
        self, tmp_path: Path, outputs: Outputs, damage: bytes
    ) -> None:
        a, b = source_of(tmp_path, batch_lines(2))
        outputs.append([answer_to(a), error_of(b)])
        outputs.close()
        with (tmp_path / "err.jsonl").open("ab") as file:
            file.write(damage)
        assert set(again(outputs).recover(ours=True).failed) == {b.fingerprint}

    def test_garbage_in_a_file_of_ours_is_passed_by(self, tmp_path: Path, outputs: Outputs) -> None:
        source = source_of(tmp_path, batch_lines(2))
        a, b = source
        outputs.append([answer_to(a)])
        outputs.close()
        with outputs.answers.open("ab") as file:
            file.write(b"\0" * 100 + b"\n")  # as a file system may leave it after a power cut

        after = again(outputs)
        assert after.recover(ours=True).answered == {a.fingerprint}
        after.append([answer_to(b)])
        after.tidy(source, 2, in_order=True)
        assert ids(outputs.answers) == ["r0", "r1"]

    def test_without_answers_everything_starts_over(self, tmp_path: Path, outputs: Outputs) -> None:
        (a,) = source_of(tmp_path, batch_lines(1))
        outputs.append([error_of(a)])

        after = again(outputs)
        assert not after.recover(ours=True).failed
        assert line_count(tmp_path / "err.jsonl") == 1  # as long as nothing is run
        after.create()
        assert line_count(tmp_path / "err.jsonl") == 0


class TestAPipe:
    def test_replaces_the_errors_of_an_earlier_run(self, tmp_path: Path) -> None:
        (a,) = source_of(tmp_path, batch_lines(1))
        for _ in range(2):
            piped = PipedOutputs(io.BytesIO(), tmp_path / "err.jsonl")
            assert not piped.recover(ours=False).failed
            piped.create()
            piped.append([error_of(a)])
            piped.close()
        assert line_count(tmp_path / "err.jsonl") == 1

    @pytest.mark.parametrize("mine", ["notes\n", "notes"])
    def test_refuses_to_write_errors_into_another_file(self, tmp_path: Path, mine: str) -> None:
        notes = tmp_path / "notes.txt"
        notes.write_text(mine)
        with pytest.raises(RequestError, match=r"notes\.txt is there already"):
            PipedOutputs(io.BytesIO(), notes).recover(ours=False)
        assert notes.read_text() == mine

    def test_may_throw_errors_away(self, tmp_path: Path) -> None:
        nowhere = tmp_path / "nowhere"
        nowhere.symlink_to("/dev/null")
        (a,) = source_of(tmp_path, batch_lines(1))
        piped = PipedOutputs(io.BytesIO(), nowhere)
        piped.recover(ours=False)
        piped.create()
        piped.append([error_of(a)])
        piped.close()
        assert nowhere.is_symlink()


class TestTidiness:
    def test_a_later_answer_stands_in_the_place_of_the_error(
        self, tmp_path: Path, outputs: Outputs
    ) -> None:
        source = source_of(tmp_path, batch_lines(3))
        a, b, c = source
        outputs.append([answer_to(a), error_of(b), answer_to(c)])
        after = again(outputs)
        after.recover(ours=True)
        after.append([answer_to(b)])

        after.tidy(source, 3, in_order=True)

        assert ids(outputs.answers) == ["r0", "r1", "r2"]
        assert not (tmp_path / "err.jsonl").exists()

    def test_together_too_and_the_last_error_counts(self, tmp_path: Path) -> None:
        source = source_of(tmp_path, batch_lines(2))
        a, b = source
        outputs = Outputs(tmp_path / "out.jsonl", None)
        outputs.append([error_of(b), error_of(a), answer_to(a)])
        outputs.append([Ended(b, {"error": error_object("Later.", code="later")}, "3" * 32)])

        outputs.tidy(source, 2, in_order=True)

        one, two = read_jsonl(outputs.answers)
        assert (one["custom_id"], one["response"]["status_code"]) == ("r0", 200)
        assert two["response"]["body"]["error"]["code"] == "later"

    def test_the_order_of_finishing_is_kept_where_it_is_wanted(
        self, tmp_path: Path, outputs: Outputs
    ) -> None:
        source = source_of(tmp_path, batch_lines(3))
        a, b, c = source
        outputs.append([answer_to(c), error_of(a), answer_to(b), answer_to(a)])
        outputs.tidy(source, 3, in_order=False)
        assert ids(outputs.answers) == ["r2", "r1", "r0"]

    def test_answers_that_no_line_asks_for_are_kept_aside(
        self, tmp_path: Path, outputs: Outputs
    ) -> None:
        (old,) = source_of(tmp_path, [batch_line("r0", "As it was.")])
        outputs.append([answer_to(old, "precious")])
        source = source_of(tmp_path, batch_lines(1))
        after = again(outputs)
        after.recover(ours=True)
        after.append([answer_to(line) for line in source])

        after.tidy(source, 1, in_order=True)

        (new,) = read_jsonl(outputs.answers)
        assert new["response"]["body"]["text"] == "Hi."
        (kept,) = read_jsonl(tmp_path / "out.jsonl.replaced")
        assert kept["response"]["body"]["text"] == "precious"

    def test_a_file_in_order_is_not_written_again(self, tmp_path: Path, outputs: Outputs) -> None:
        source = source_of(tmp_path, batch_lines(3))
        a, b, c = source
        outputs.append([answer_to(a), error_of(b)])
        after = again(outputs)
        after.recover(ours=True)
        after.append([answer_to(c)])
        before = outputs.answers.stat().st_ino
        after.tidy(source, 3, in_order=True)
        assert outputs.answers.stat().st_ino == before

    def test_a_full_disk_leaves_what_was_there_and_nothing_half_written(
        self, tmp_path: Path, outputs: Outputs, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source = source_of(tmp_path, batch_lines(2))
        a, b = source
        outputs.append([answer_to(b), error_of(a)])
        outputs.close()
        before = sorted(path.name for path in tmp_path.iterdir())
        whole = outputs.answers.read_bytes()

        def full(file: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(batch_files, "sync", full)
        with pytest.raises(OSError, match="No space left"):
            again(outputs).tidy(source, 2, in_order=True)
        assert sorted(path.name for path in tmp_path.iterdir()) == before
        assert outputs.answers.read_bytes() == whole

    @pytest.mark.parametrize("ending", [".gz", ".zst"])
    def test_nor_does_it_where_they_are_compressed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
    ) -> None:
        def full(source: object, target: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(shutil, "copyfileobj", full)
        answers = tmp_path / "answers"
        answers.write_text("{}\n")
        with pytest.raises(OSError, match="No space left"):
            compress(answers, tmp_path / f"out.jsonl{ending}")
        assert list(tmp_path.iterdir()) == [answers]

    def test_an_input_that_changed_meanwhile_is_said(
        self, tmp_path: Path, outputs: Outputs
    ) -> None:
        source = source_of(tmp_path, batch_lines(2))
        outputs.append([answer_to(line) for line in source])
        source_of(tmp_path, batch_lines(3))
        after = again(outputs)
        after.recover(ours=True)
        with pytest.raises(RequestError, match=r"in\.jsonl changed"):
            after.tidy(source, 2, in_order=True)
        assert ids(outputs.answers) == ["r0", "r1"]


class TestTheState:
    def test_a_run_is_known_again_by_its_name(self, tmp_path: Path) -> None:
        path = tmp_path / "out.jsonl.state"
        with open_state(path, "out.jsonl") as state:
            assert state.run is None
            state.start()
            name = state.run
        with open_state(path, "out.jsonl") as state:
            assert state.run == name
            state.start()
            assert state.run != name
        assert json.loads(path.read_text())["run"] == state.run

    def test_two_runs_on_one_output_are_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "out.jsonl.state"
        with (
            open_state(path, "out.jsonl"),
            pytest.raises(RequestError, match=r"Another `mlx-rq batch` is writing out\.jsonl"),
            open_state(path, "out.jsonl"),
        ):
            pass

    @pytest.mark.parametrize("torn", [b"", b'{"ru', b'{"other": 1}', b"[]"])
    def test_a_torn_one_is_a_new_one(self, tmp_path: Path, torn: bytes) -> None:
        path = tmp_path / "out.jsonl.state"
        path.write_bytes(torn)
        with open_state(path, "out.jsonl") as state:
            assert state.run is None
            state.start()
        with open_state(path, "out.jsonl") as state:
            assert state.run is not None

    def test_none_is_left_where_nothing_was_run(self, tmp_path: Path) -> None:
        with open_state(tmp_path / "out.jsonl.state", "out.jsonl"):
            pass
        assert not list(tmp_path.iterdir())
