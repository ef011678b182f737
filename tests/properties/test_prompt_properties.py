"""prompt.py: no text of a message can become a control token, whatever it is made of and wherever it is cut."""

from __future__ import annotations

from byte_tokenizer import CONTROL, FIRST_CONTROL, ByteTokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridgen_gguf.prompt.encode import ControlText, StandIns, tokenize_rendered

PARTS = [*CONTROL, "<", "s>", "<|", "|>", "im_", "end", "[", "INST]", "/", "a", " ", "\n", "漢", "😀", "\U000f0000"]
TEXTS = st.lists(st.sampled_from(PARTS), max_size=12).map("".join)
TOKENIZER = ByteTokenizer()
CONTROL_TEXT = ControlText(TOKENIZER.control_tokens())


@settings(max_examples=400, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=4), st.sampled_from(["", "</s>", "s>", "|im_end|>", "\n"]))
def test_hidden_texts_beside_each_other_hold_no_control_token(contents: list[str], between: str) -> None:
    stand_ins = StandIns(CONTROL_TEXT, [*contents, between])
    text = between.join(stand_ins.hide(content) for content in contents)
    assert stand_ins.restore(text) == between.join(contents)
    assert len(text) == len(between.join(contents))
    ids = tokenize_rendered(TOKENIZER, text, CONTROL_TEXT, stand_ins)
    expected = (len(contents) - 1) * (between == "</s>")
    assert sum(token >= FIRST_CONTROL for token in ids) == expected
    assert TOKENIZER.show(ids).replace("«", "").replace("»", "") == between.join(contents)


@settings(max_examples=400, deadline=None)
@given(TEXTS)
def test_own_partition_is_the_tokenizers(text: str) -> None:
    class Always(StandIns):
        def occur_in(self, text: str) -> bool:
            return True

    stand_ins = Always(CONTROL_TEXT, [text])
    assert tokenize_rendered(TOKENIZER, text, CONTROL_TEXT, stand_ins) == TOKENIZER.tokenize(text.encode(), False, True)
