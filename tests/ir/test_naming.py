"""New names are those that counting from the first number would find, however many there are."""

from __future__ import annotations

from onnx_remat.ir.naming import Unused


def test_a_wish_that_is_made_often_takes_no_longer_each_time():
    """Counted from the first number each time, the names of this test take an hour."""
    names = Unused(("Mul__remat1", "Mul__remat1_3"))
    made = [names.fresh("Mul__remat1") for _ in range(100_000)]
    assert made[:3] == ["Mul__remat1_2", "Mul__remat1_4", "Mul__remat1_5"]
    assert len(set(made)) == 100_000 and made[-1] == "Mul__remat1_100002"
    assert names.fresh("Add__remat1") == "Add__remat1"


def test_a_wish_may_be_the_name_made_of_another():
    names = Unused(("a",))
    assert [names.fresh(wish) for wish in ("a", "a_2", "a", "a_2")] == ["a_2", "a_2_2", "a_3", "a_2_3"]
