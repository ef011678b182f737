"""The choice of types: within the budget, no worse than any uniform choice, better with more room."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridgen_gguf.errors import DoesNotFit
from hybridgen_gguf.make.allocate import Choice, allocate

_curve = st.lists(
    st.tuples(st.integers(1, 1000), st.floats(0, 100, allow_nan=False)), min_size=1, max_size=6
).map(lambda rows: [Choice(f"T{i}", size, loss) for i, (size, loss) in enumerate(rows)])  # fmt: skip
_model = st.dictionaries(st.sampled_from("abcdefgh"), _curve, min_size=1)


def _bytes(chosen: dict[str, Choice]) -> int:
    return sum(choice.bytes for choice in chosen.values())


def _loss(chosen: dict[str, Choice]) -> float:
    return sum(choice.loss for choice in chosen.values())


@given(_model, st.integers(0, 6000))
def test_within_the_budget_or_refused(model: dict[str, list[Choice]], budget: int) -> None:
    least = sum(min(choice.bytes for choice in curve) for curve in model.values())
    if least > budget:
        with pytest.raises(DoesNotFit) as caught:
            allocate(model, budget)
        assert caught.value.nearest == {"bytes": least}
        return
    chosen = allocate(model, budget)
    assert _bytes(chosen) <= budget
    assert set(chosen) == set(model)


@given(_model)
def test_with_room_for_all_the_loss_is_least(model: dict[str, list[Choice]]) -> None:
    chosen = allocate(model, 1 << 30)
    assert _loss(chosen) == pytest.approx(sum(min(c.loss for c in curve) for curve in model.values()))


@given(_model, st.integers(0, 6000), st.integers(0, 3000))
def test_first_step_goes_where_it_saves_most(model: dict[str, list[Choice]], budget: int, more: int) -> None:
    try:
        less = allocate(model, budget)
    except DoesNotFit:
        return
    # Greedy steps along the hulls: more room can only be refused for a step that is larger than what is left.
    assert _loss(allocate(model, budget + more)) <= _loss(less) + max(c.loss for v in model.values() for c in v)


def test_bytes_go_to_the_sensitive_tensor() -> None:
    def curve(sensitivity: float) -> list[Choice]:
        return [Choice("Q4", 40, 4 * sensitivity), Choice("Q5", 50, sensitivity), Choice("Q8", 80, 0.1 * sensitivity)]

    chosen = allocate({"deaf": curve(1.0), "keen": curve(100.0)}, 130)
    assert {name: choice.type for name, choice in chosen.items()} == {"deaf": "Q5", "keen": "Q8"}
