"""Contenders in turn: who begins rotates, and every result is kept."""

from scripts.benchmarks.rounds import median_and_spread, rounds_in_turn


def test_the_order_of_a_round_rotates() -> None:
    seen = []
    contenders = {name: lambda number, name=name: seen.append((number, name)) or number for name in "abc"}
    assert rounds_in_turn(contenders, 4) == {"a": [0, 1, 2, 3], "b": [0, 1, 2, 3], "c": [0, 1, 2, 3]}
    assert "".join(name for _, name in seen) == "abc" + "bca" + "cab" + "abc"
    assert [number for number, _ in seen] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_spread_is_the_interquartile_range() -> None:
    assert median_and_spread([1.0, 2.0, 3.0, 4.0, 100.0]) == (3.0, 52.0 - 1.5)
