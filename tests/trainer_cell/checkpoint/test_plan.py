from __future__ import annotations

from trainer_cell.checkpoint.plan import Piece, make_plan
from trainer_cell.training.adapter import Sharding

WHOLE = Sharding((4, 8), None, 0, (4, 8))


def written(pieces: tuple[Piece, ...]) -> int:
    return sum(piece.num_bytes for piece in pieces)


def test_copies_are_written_once_and_spread_over_those_who_hold_them() -> None:
    tables = [{f"tensor{number}": WHOLE for number in range(10)}] * 4
    plan = make_plan(list(tables), ("weight",), "fp32")
    keys = [piece.key for of_rank in plan.pieces for piece in of_rank]
    assert sorted(keys) == sorted(f"tensor{number}/weight" for number in range(10))
    assert max(map(written, plan.pieces)) - min(map(written, plan.pieces)) <= 4 * 8 * 4


def test_every_piece_of_a_cut_tensor_is_written_and_an_empty_one_is_not() -> None:
    cut = [Sharding((5, 8), 0, offset, (size, 8)) for offset, size in ((0, 3), (3, 2), (5, 0))]
    plan = make_plan([{"tensor": sharding} for sharding in cut], ("weight", "exp_avg"), "bf16")
    assert [[piece.sharding.local_shape for piece in of_rank] for of_rank in plan.pieces] == [
        [(3, 8), (3, 8)],
        [(2, 8), (2, 8)],
        [],
    ]
    assert plan.num_bytes == 5 * 8 * (2 + 4)
