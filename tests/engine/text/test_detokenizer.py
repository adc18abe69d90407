"""Tokens to text: as the tokenizer itself decodes, cut at the stop that is complete first."""

from itertools import pairwise

from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper
from spoken_texts import EACH, TEXTS, TOKENIZERS, sentencepiece

from mlx_rq.engine.text.detokenizer import SequenceText
from mlx_rq.engine.text.token_bytes import TokenBytes


def taken(tokenizer: TokenizerWrapper, tokens: list[int], stops: list[str]) -> tuple[str, int]:
    """A sequence's text, and how many tokens it took to see the stop (all of them, without one)."""
    text = SequenceText(tokenizer, stops)
    for count, token in enumerate(tokens, 1):
        if text.add(token):
            return text.finish(), count
    return text.finish(), len(tokens)


def by_force(text: str, stops: list[str]) -> str:
    """Cuts a text as if it came character by character: the stop that is whole first counts."""
    for end in range(len(text) + 1):
        begins = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if begins:
            return text[: min(begins)]
    return text


@EACH
@settings(max_examples=60)
@given(text=TEXTS)
@example(text="\ufffd")
def test_a_text_is_what_the_tokenizer_decodes(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]()
    tokens = tokenizer.encode(text, add_special_tokens=False)
    expected = tokenizer.decode(tokens, skip_special_tokens=True)

    for stops in ([], ["\x00never\x00"]):  # decoded at once, and token by token
        assert taken(tokenizer, tokens, stops)[0] == expected.rstrip("\ufffd")


def encoded(name: str, text: str) -> tuple[TokenizerWrapper, list[int], str]:
    """A tokenizer, a text's tokens, and what they say; nothing, where that is no whole text."""
    tokenizer = TOKENIZERS[name]()
    tokens = tokenizer.encode(text, add_special_tokens=False)
    decoded = tokenizer.decode(tokens, skip_special_tokens=True)
    return tokenizer, tokens, "" if "\ufffd" in decoded else decoded


@EACH
@settings(max_examples=80)
@given(text=TEXTS, data=st.data())
def test_stops_are_found_wherever_tokens_begin_and_end(
    name: str, text: str, data: st.DataObject
) -> None:
    tokenizer, tokens, decoded = encoded(name, text)
    if not decoded:
        return
    stops = []
    for _ in range(data.draw(st.integers(1, 4))):
        begin = data.draw(st.integers(0, len(decoded) - 1))
        end = data.draw(st.integers(begin + 1, len(decoded)))
        stops.append(decoded[begin:end])  # they overlap, and may begin the text

    cut, count = taken(tokenizer, tokens, stops)

    assert cut == by_force(decoded, stops)
    # It is seen with its last token, not one later (nor is anything before it lost).
    whole = tokenizer.decode(tokens[:count], skip_special_tokens=True)
    assert any(stop in whole for stop in stops)
    before = tokenizer.decode(tokens[: count - 1], skip_special_tokens=True).rstrip("\ufffd")
    assert by_force(before, stops) == before


@EACH
@settings(max_examples=40)
@given(text=TEXTS, data=st.data())
def test_what_is_before_a_stop_are_tokens_and_a_rest(
    name: str, text: str, data: st.DataObject
) -> None:
    tokenizer, tokens, decoded = encoded(name, text)
    if not decoded:
        return
    begin = data.draw(st.integers(0, len(decoded) - 1))
    stopped = SequenceText(tokenizer, [decoded[begin:]])
    while not stopped.add(tokens[len(stopped.tokens)]):
        pass

    before, rest = stopped.up_to_stop()
    through, end = stopped.up_to_stop(with_it=True)

    assert list(through) == tokens[: len(through)]
    whole = tokenizer.decode(list(through), skip_special_tokens=True) + end
    assert whole == stopped.finish() + decoded[begin:]
    assert list(before) == tokens[: len(before)]
    assert tokenizer.decode(list(before), skip_special_tokens=True) + rest == stopped.finish()
    longer = tokenizer.decode(tokens[: len(before) + 1], skip_special_tokens=True)
    assert not stopped.finish().startswith(longer)


def test_one_text_in_all_its_splits_into_tokens() -> None:
    """Every way to cut eight bytes into pieces, by a tokenizer whose tokens are any pieces."""
    text, stops = "ab\u00e9abc", ["abc", "b\u00e9", "\u00e9a"]
    data = text.encode()
    pieces = {data[i:j] for i in range(len(data)) for j in range(i + 1, len(data) + 1)}

    class Pieces:
        """Decodes tokens that are indices of byte strings."""

        known = sorted(pieces)

        def decode(self, tokens: list[int], **_: bool) -> str:
            return b"".join(self.known[token] for token in tokens).decode(errors="replace")

    expected = by_force(text, stops)
    assert expected == "a"
    for split in range(2 ** (len(data) - 1)):
        places = [0, *(i + 1 for i in range(len(data) - 1) if split >> i & 1), len(data)]
        cut = [data[i:j] for i, j in pairwise(places)]
        tokens = [Pieces.known.index(piece) for piece in cut]
        assert taken(Pieces(), tokens, stops)[0] == expected, cut


@EACH
def test_a_character_that_the_budget_cut_is_left_out(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    if name == "bytes":
        return  # its bytes are characters of their own
    tokens = tokenizer.encode("a\U0001f30d", add_special_tokens=False)
    assert len(tokens) > 2
    assert taken(tokenizer, tokens[:-1], [])[0] == "a"
    assert taken(tokenizer, tokens[:-1], ["zz"])[0] == "a"


class TestLeadingSpaces:
    def test_an_answer_begins_without_one_and_a_continuation_keeps_it(self) -> None:
        tokenizer = sentencepiece()
        prompt = tokenizer.encode("the cat", add_special_tokens=False)
        tokens = tokenizer.encode("sat on", add_special_tokens=False)
        assert tokenizer.convert_ids_to_tokens(tokens[0]).startswith("\u2581")

        for stops in ([], ["zz"]):
            answer = SequenceText(tokenizer, stops)
            continuation = SequenceText(tokenizer, stops, prompt=prompt)
            for token in tokens:
                answer.add(token)
                continuation.add(token)
            assert answer.finish() == "sat on"
            assert continuation.finish() == " sat on"

    def test_a_stop_may_begin_with_one(self) -> None:
        tokenizer = sentencepiece()
        prompt = tokenizer.encode("the cat", add_special_tokens=False)
        text = SequenceText(tokenizer, [" sat"], prompt=prompt)
        tokens = tokenizer.encode("sat on", add_special_tokens=False)
        assert any(text.add(token) for token in tokens)
        assert text.finish() == ""

    def test_offsets_of_tokens_count_the_text_as_it_is_shown(self) -> None:
        tokenizer = sentencepiece()
        token_bytes = TokenBytes(tokenizer)
        tokens = tokenizer.encode("sat on", add_special_tokens=False)
        pieces = [token_bytes.spell(token).decode() for token in tokens]
        assert "".join(pieces) == " sat on"
        starts = [len("".join(pieces[:i])) for i in range(len(pieces))]
        assert token_bytes.offsets(tokens, " sat on") == starts
        assert token_bytes.offsets(tokens, "sat on") == [max(0, start - 1) for start in starts]
        euro = tokenizer.encode("\u20ac", add_special_tokens=False)
        assert b"".join(map(token_bytes.spell, euro)) == b" \xe2\x82\xac"
