"""Reading rows, and the order in which steps use them."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from tandem.platform.data.rows import DataError, DataOrder, Row, read_rows
from tandem.platform.rewards.answers import check_answers


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def rows_of_step(order: DataOrder, step: int) -> list[int]:
    return [order.row_of_group(group) for group in order.group_ids_of_step(step)]


def test_jsonl_rows_with_metadata_and_blank_lines(tmp_path: Path) -> None:
    path = write(
        tmp_path / "train.jsonl",
        '{"prompt": "1+1=", "answer": 2, "level": "easy"}\r\n\n   \n{"prompt": "2+2=", "answer": null}\n',
    )
    rows = read_rows(path)
    assert rows == [Row("1+1=", 2, {"level": "easy"}), Row("2+2=", None, {})]
    assert [row.where for row in rows] == [f"{path}, line 1", f"{path}, line 4"]


def test_line_separators_inside_text_do_not_split_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", '{"prompt": "a\u2028b\u0085c", "answer": 1}\n{"prompt": "d", "answer": 2}')
    assert [row.prompt for row in read_rows(path)] == ["a\u2028b\u0085c", "d"]


def test_byte_order_mark_is_not_text(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", b'\xef\xbb\xbf{"prompt": "a", "answer": 1}')
    assert read_rows(path) == [Row("a", 1)]


def test_keys_are_settings(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", '{"question": "a", "gold": "b", "prompt": "c"}')
    assert read_rows(path, "question", "gold") == [Row("a", "b", {"prompt": "c"})]


def test_parquet_gives_the_same_rows_as_jsonl(tmp_path: Path) -> None:
    records = [
        {"prompt": [{"role": "user", "content": "hi"}], "answer": "a", "id": 1},
        {"prompt": [{"role": "system", "content": ""}, {"role": "user", "content": "ho"}], "answer": None, "id": 2},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "train.parquet")
    write(tmp_path / "train.jsonl", "\n".join(json.dumps(record) for record in records))
    rows = read_rows(tmp_path / "train.parquet")
    assert rows == read_rows(tmp_path / "train.jsonl")
    assert rows[1].where.endswith("train.parquet, row 2")


def test_an_answer_that_is_not_there_is_a_null_from_both_kinds_of_file(tmp_path: Path) -> None:
    records = [{"prompt": "a", "answer": 1}, {"prompt": "b"}, {"prompt": "c", "answer": None}]
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "train.parquet")
    write(tmp_path / "train.jsonl", "\n".join(json.dumps(record) for record in records))
    rows = read_rows(tmp_path / "train.jsonl")
    assert [row.answer for row in rows] == [1, None, None]
    assert rows == read_rows(tmp_path / "train.parquet")
    with pytest.raises(DataError, match=r"train\.jsonl, line 2: .*has no answer"):
        check_answers(rows, ["exact_match"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('\n{"prompt": "a", "answer": }\n', ["line 2, column 27", "not valid JSON"]),
        ('{"prompt": "a", "answer": 1}\n["a"]', ["line 2", "expected an object", "a list"]),
        ('{"promt": "a", "answer": 1}', ["line 1", "no field 'prompt'", "data.prompt_key", "'promt', 'answer'"]),
        ('{"prompt": "a"}', ["line 1", "no field 'answer'", "data.answer_key", "here: 'prompt'"]),
        ("{}", ["line 1", "fields here: none"]),
        ('{"prompt": 7, "answer": 1}', ["line 1", "'prompt'", "text or a list of chat messages, got a number"]),
        ('{"prompt": ["a"], "answer": 1}', ["line 1", "item 1 is text"]),
        ('{"prompt": [{"role": "user"}], "answer": 1}', ["line 1", "message (1)", "'content' is nothing"]),
        ('{"prompt": [{"role": 3, "content": ""}], "answer": 1}', ["'role' is a number"]),
        ('{"prompt": "", "answer": 1}', ["line 1", "is empty"]),
        ('{"prompt": " \\n", "answer": 1}', ["line 1", "is empty"]),
        ('{"prompt": [], "answer": 1}', ["line 1", "is empty"]),
        ("\n \n", ["no rows"]),
        (b'{"prompt": "a", "answer": 1}\n{"prompt": "\xff", "answer": 1}', ["line 2", "UTF-8", "byte 13"]),
    ],
)
def test_unusable_lines_are_named(tmp_path: Path, text: str | bytes, expected: list[str]) -> None:
    path = write(tmp_path / "train.jsonl", text)
    with pytest.raises(DataError) as error:
        read_rows(path)
    for part in [str(path), *expected]:
        assert part in str(error.value)


def test_missing_file_names_a_neighbour(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", "{}")
    with pytest.raises(DataError, match=r"no such file; did you mean .*train\.jsonl\?"):
        read_rows(tmp_path / "tarin.jsonl")
    with pytest.raises(DataError, match="there is no folder"):
        read_rows(tmp_path / "nowhere" / "train.jsonl")


def test_unknown_kind_of_file_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'\.csv'; data is read from \.jsonl or \.parquet"):
        read_rows(write(tmp_path / "train.csv", "a"))


def test_unreadable_parquet_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train\.parquet: not a readable parquet file"):
        read_rows(write(tmp_path / "train.parquet", "not parquet"))


def test_batches_carry_over_the_end_of_a_pass() -> None:
    order = DataOrder(size=1000, prompts_per_step=128, seed=7, shuffle=True)
    eight = [row for step in range(8) for row in rows_of_step(order, step)]
    assert sorted(eight[:1000]) == list(range(1000))
    assert order.group_ids_of_step(8)[0] == 1024  # offset 24 of the second pass
    second = eight[1000:] + [row for step in range(8, 16) for row in rows_of_step(order, step)]
    assert sorted(second[:1000]) == list(range(1000))
    assert second[:1000] != eight[:1000]


def test_file_order_without_shuffle() -> None:
    order = DataOrder(size=5, prompts_per_step=3, seed=0, shuffle=False)
    assert [rows_of_step(order, step) for step in range(3)] == [[0, 1, 2], [3, 4, 0], [1, 2, 3]]
    assert [order.group_ids_of_step(step) for step in range(3)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


def test_a_step_larger_than_the_data_repeats_rows_in_groups_of_their_own() -> None:
    order = DataOrder(size=2, prompts_per_step=5, seed=0, shuffle=True)
    rows = rows_of_step(order, 0)
    assert sorted(rows[:2]) == sorted(rows[2:4]) == [0, 1]
    assert len(set(order.group_ids_of_step(0) + order.group_ids_of_step(1))) == 10


def test_a_step_does_not_depend_on_the_steps_before_it() -> None:
    def fresh() -> DataOrder:
        return DataOrder(size=6, prompts_per_step=2, seed=7)

    whole = [rows_of_step(fresh(), step) for step in range(6)]
    order = fresh()
    assert [rows_of_step(order, step) for step in range(6)] == whole
    assert [rows_of_step(fresh(), step) for step in (2, 3, 4, 5)] == whole[2:]


def test_seeds_give_the_same_order_in_every_process() -> None:
    code = (
        "from tandem.platform.data.rows import DataOrder\norder = DataOrder(50, 20, {})\n"
        "print([order.row_of_group(group) for group in range(60, 80)])"
    )

    def in_new_process(seed: int) -> str:
        command = [sys.executable, "-c", code.format(seed)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert in_new_process(7).strip() == str(rows_of_step(DataOrder(50, 20, 7), 3))
    assert in_new_process(7) != in_new_process(8)


@pytest.mark.parametrize("arguments", [(0, 1), (1, 0)])
def test_nothing_to_draw_is_an_error(arguments: tuple[int, int]) -> None:
    with pytest.raises(DataError, match="cannot draw"):
        DataOrder(*arguments, seed=0)
