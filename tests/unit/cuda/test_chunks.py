"""Tables of FSDP2's copies, as recorded on an H200 for BERT-base cut in two."""

from tests.truth.cases import H200

from vramfit.cuda.kernels.elementwise import chunk_cat_bytes, split_copy_bytes

HIDDEN, INNER, VOCABULARY = 768, 3072, 30522
LAYER = [
    *[HIDDEN * HIDDEN, HIDDEN] * 4,
    *[HIDDEN, HIDDEN],
    *[HIDDEN * INNER, INNER, INNER * HIDDEN, HIDDEN],
    *[HIDDEN, HIDDEN],
]
ROOT = [VOCABULARY * HIDDEN, 512 * HIDDEN, 2 * HIDDEN, HIDDEN, HIDDEN, HIDDEN * HIDDEN, HIDDEN, 2 * HIDDEN, 2]


def halves(elements: list[int]) -> list[int]:
    return [n // 2 * 4 for n in elements]


def test_parts_of_a_gathered_buffer_are_copied_by_a_table() -> None:
    assert split_copy_bytes(halves(LAYER), 2, H200) == 28_256
    assert split_copy_bytes(halves(ROOT), 2, H200) == 32_152


def test_gradients_are_put_side_by_side_by_a_table() -> None:
    assert chunk_cat_bytes(halves(LAYER)) == 56_176
    assert chunk_cat_bytes(halves(ROOT)) == 191_328
