from __future__ import annotations

from trainer_cell.checkpoint.plan import Piece, Table, make_plan
from trainer_cell.training.adapter import Sharding

WHOLE = Sharding((4, 8), None, 0, (4, 8))
TENSORS: Table = {f"tensor{number}": (WHOLE, 32 * number) for number in range(10)}


def written(pieces: tuple[Piece, ...]) -> int:
    return sum(piece.num_bytes for piece in pieces)


def test_copies_are_written_once_and_spread_over_those_who_hold_them() -> None:
    plan = make_plan([TENSORS] * 4, ("weight",), "fp32")
    keys = [piece.key for of_rank in plan.pieces for piece in of_rank]
    assert sorted(keys) == sorted(f"tensor{number}/weight" for number in range(10))
    assert max(map(written, plan.pieces)) - min(map(written, plan.pieces)) <= 4 * 8 * 4


def test_every_piece_of_a_cut_tensor_is_written_and_an_empty_one_is_not() -> None:
    cut = [Sharding((5, 8), 0, offset, (size, 8)) for offset, size in ((0, 3), (3, 2), (5, 0))]
    plan = make_plan([{"tensor": (sharding, 0)} for sharding in cut], ("weight", "exp_avg"), "bf16")
    assert [[piece.sharding.local_shape for piece in of_rank] for of_rank in plan.pieces] == [
        [(3, 8), (3, 8)],
        [(2, 8), (2, 8)],
        [],
    ]
    assert plan.layouts[2] is None
    assert plan.stretches[2] == ()
    assert plan.num_bytes == sum(layout.size for layout in plan.layouts if layout is not None)


def test_what_lies_side_by_side_is_captured_in_one_copy_for_each_part() -> None:
    (stretches,) = make_plan([TENSORS], ("weight", "master", "exp_avg"), "bf16").stretches
    assert [(one.part, one.source, one.numel) for one in stretches] == [
        (part, 0, 320) for part in ("weight", "master", "exp_avg")
    ]


def test_a_gap_between_two_tensors_is_not_captured() -> None:
    gapped: Table = {"a": (WHOLE, 0), "b": (WHOLE, 48)}
    (stretches,) = make_plan([gapped], ("weight",), "fp32").stretches
    assert [(one.source, one.numel) for one in stretches] == [(0, 32), (48, 32)]
    assert stretches[1].target - stretches[0].target == 32 * 4


def test_each_of_several_holders_captures_one_run_of_a_part() -> None:
    first, second = make_plan([TENSORS] * 2, ("weight", "exp_avg"), "fp32").stretches
    assert [(one.part, one.numel) for one in first] == [("weight", 320)]
    assert [(one.part, one.numel) for one in second] == [("exp_avg", 320)]
