"""A .jsonl and a .parquet file of the same rows give the same plain values, and errors name unusable rows."""

from __future__ import annotations

import json
import os
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow
import pytest
from pyarrow import parquet

from tandem.platform.data.rows import DataError, Row, read_rows
from tandem.platform.rewards.answers import check_answers

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
RECORDS: list[dict[str, Any]] = [
    {
        "prompt": [{"role": "user", "content": "hi", "name": "Ann"}, {"role": "user", "content": "ho"}],
        "answer": "a",
        "source": {"site": "x", "tags": [{"n": 1}, {"m": 2}]},
    },
    {
        "prompt": [
            {"role": "user", "content": "1+2?"},
            {"role": "assistant", "tool_calls": [CALL, {"type": "function", "function": {"name": "stop"}}]},
            {"role": "tool", "content": "3", "tool_call_id": "1"},
        ],
        "answer": None,
        "level": 3,
        "source": {"tags": []},
    },
]


def write_jsonl(path: Path, records: list[Any]) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records))
    return path


def write_parquet(path: Path, records: list[dict[str, Any]] | pyarrow.Table) -> Path:
    table = records if isinstance(records, pyarrow.Table) else pyarrow.Table.from_pylist(records)
    parquet.write_table(table, path)
    return path


def column(path: Path, values: pyarrow.Array, name: str = "extra") -> list[Row]:
    """The rows of a parquet file with this column beside prompts and answers."""
    size = len(values)
    table = pyarrow.table({"prompt": ["p"] * size, "answer": ["a"] * size, name: values})
    return read_rows(write_parquet(path / "column.parquet", table))


# Null


def test_fields_that_only_other_rows_have_are_not_there(tmp_path: Path) -> None:
    """Arrow gives every message, tool call and object all fields of the others."""
    names = [key for record in RECORDS for key in record]
    everywhere = [{name: record.get(name) for name in names} for record in RECORDS]
    rows = read_rows(write_parquet(tmp_path / "a.parquet", everywhere))
    assert rows == read_rows(write_jsonl(tmp_path / "a.jsonl", RECORDS))
    assert rows[0].prompt == RECORDS[0]["prompt"]
    assert rows[1].prompt == RECORDS[1]["prompt"]
    assert rows[0].metadata == {"source": {"site": "x", "tags": [{"n": 1}, {"m": 2}]}}
    assert rows[1].metadata == {"level": 3, "source": {"tags": []}}


def test_a_null_that_is_written_is_not_there_either(tmp_path: Path) -> None:
    message = {"role": "assistant", "content": None, "name": None, "tool_calls": [CALL]}
    record = {"prompt": [{"role": "user", "content": "q"}, message], "answer": None, "level": None, "in": {"a": None}}
    [row] = read_rows(write_jsonl(tmp_path / "a.jsonl", [record]))
    assert row.prompt == [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [CALL]}]
    assert (row.answer, row.metadata) == (None, {"in": {}})


def test_a_null_of_a_list_keeps_its_place(tmp_path: Path) -> None:
    record = {"prompt": "p", "answer": "a", "scores": [1, None, 2]}
    for path in (write_jsonl(tmp_path / "a.jsonl", [record]), write_parquet(tmp_path / "a.parquet", [record])):
        assert read_rows(path)[0].metadata == {"scores": [1, None, 2]}


def test_content_may_be_missing_beside_tool_calls_alone(tmp_path: Path) -> None:
    for message in ({"role": "assistant", "content": None}, {"role": "assistant", "content": None, "tool_calls": []}):
        with pytest.raises(DataError, match=r"line 1: field 'prompt' .*message \(1\) whose 'content' is nothing"):
            read_rows(write_jsonl(tmp_path / "a.jsonl", [{"prompt": [message], "answer": "a"}]))


def test_whole_numbers_are_the_same_in_a_column_of_floats(tmp_path: Path) -> None:
    records = [{"prompt": "p", "answer": answer, "m": {"a": [answer]}} for answer in (7, 2.5, None, -3, 2**53)]
    rows = read_rows(write_parquet(tmp_path / "a.parquet", records))
    assert rows == read_rows(write_jsonl(tmp_path / "a.jsonl", records))
    assert [str(row.answer) for row in rows] == ["7", "2.5", "None", "-3", str(2**53)]
    assert str(rows[0].metadata) == "{'m': {'a': [7]}}"
    for text, whole in (("7.0", "7"), ("-0.0", "0"), ("1e3", "1000"), ("1e300", "1e+300")):
        (tmp_path / "a.jsonl").write_text(f'{{"prompt": "p", "answer": {text}}}')
        assert str(read_rows(tmp_path / "a.jsonl")[0].answer) == whole


# Types that parquet has and JSON has not


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (pyarrow.array([Decimal("7"), Decimal("12")]), [7, 12]),
        (pyarrow.array([Decimal("0.10")]), [0.1]),
        (pyarrow.array([date(2024, 2, 3)]), ["2024-02-03"]),
        (pyarrow.array([datetime(2024, 2, 3, 4, 5, tzinfo=UTC)]), ["2024-02-03T04:05:00+00:00"]),
        (pyarrow.array([1_000_000_000], pyarrow.timestamp("ns")), ["1970-01-01T00:00:01"]),
        (pyarrow.array([b"caf\xc3\xa9"]), ["café"]),
        (pyarrow.array([UUID(int=1).bytes], pyarrow.uuid()), [str(UUID(int=1))]),
        (pyarrow.array([[("a", 1)], []], pyarrow.map_(pyarrow.string(), pyarrow.int64())), [{"a": 1}, {}]),
        (pyarrow.array([[(1, "x")]], pyarrow.map_(pyarrow.int64(), pyarrow.string())), [{"1": "x"}]),
        (pyarrow.array(["x", "y", "x"]).dictionary_encode(), ["x", "y", "x"]),
        (pyarrow.array(["x"], pyarrow.large_string()), ["x"]),
        (pyarrow.array([0.1, 1 / 3, 3e38], pyarrow.float32()), [0.1, 0.33333334, 3e38]),
        (pyarrow.array([0.1], pyarrow.float16()), [0.1]),
        (pyarrow.array([[{"a": 0.1}], None], pyarrow.list_(pyarrow.struct([("a", pyarrow.float32())]))), [[{"a": 0.1}]]),
        (pyarrow.array([[("k", 0.1)]], pyarrow.map_(pyarrow.string(), pyarrow.float32())), [{"k": 0.1}]),
        (pyarrow.array([2**64 - 1], pyarrow.uint64()), [2**64 - 1]),
    ],
)
def test_values_are_those_that_json_would_give(tmp_path: Path, values: pyarrow.Array, expected: list[Any]) -> None:
    found = [row.metadata["extra"] for row in column(tmp_path, values) if row.metadata]
    assert found == expected
    assert [type(value) for value in found] == [type(value) for value in expected]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (pyarrow.array([None, b"\xff\xd8"]), "is bytes that are not UTF-8 text"),
        (pyarrow.array([None, timedelta(seconds=3)]), "is of type timedelta, which JSON does not support"),
        (pyarrow.array([None, Decimal("123456789012345678.5")]), "is the decimal 123456789012345678.5, with more digits"),
        (pyarrow.array([None, 1], pyarrow.timestamp("ns")), "cannot be read: Nanosecond resolution"),
        (pyarrow.array([0.5, float("nan")]), "is nan, which is not a number"),
        (pyarrow.array([None, [0.5, float("inf")]]), r"at \[1\] is inf, which is not a number"),
        (
            pyarrow.array([[], [("a", 1), ("a", 2)]], pyarrow.map_(pyarrow.string(), pyarrow.int64())),
            "cannot be read: .*'a'",
        ),
        (
            pyarrow.StringArray.from_buffers(
                2, pyarrow.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pyarrow.py_buffer(b"a\xff")
            ),
            "cannot be read: .*utf-8",
        ),
    ],
)
def test_what_has_no_clear_meaning_is_refused(tmp_path: Path, values: pyarrow.Array, said: str) -> None:
    with pytest.raises(DataError, match=rf"column\.parquet, row 2: field 'extra' {said}"):
        column(tmp_path, values)


def test_the_index_of_pandas_is_no_field(tmp_path: Path) -> None:
    assert [row.metadata for row in column(tmp_path, pyarrow.array([5, 7]), "__index_level_0__")] == [{}, {}]


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pyarrow.table([["p"], ["a"], ["b"]], names=["prompt", "answer", "answer"])
    with pytest.raises(DataError, match=r"a\.parquet: two columns are called 'answer'"):
        read_rows(write_parquet(tmp_path / "a.parquet", table))


# Traps of JSON


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"prompt": "\\ud800", "answer": 1}', r"field 'prompt' has half a surrogate pair \(U\+D800\) as character 1"),
        ('{"prompt": "p", "answer": "a\\udfff"}', r"field 'answer' has half a surrogate pair \(U\+DFFF\) as character 2"),
        ('{"prompt": "p", "answer": 1, "m": {"a": ["\\ud800"]}}', r"field 'm' at \['a'\]\[0\] has half a surrogate pair"),
        ('{"prompt": "p", "answer": 1, "m": {"\\ud800": 1}}', "field 'm' has half a surrogate pair"),
        ('{"prompt": "p", "answer": 1, "\\ud800": 1}', r"the name of field '\\ud800' has half a surrogate pair"),
        ('{"prompt": [{"role": "user", "content": "\\ud800"}], "answer": 1}', r"'prompt' at \[0\]\['content'\] has half"),
        ('{"prompt": "p", "answer": NaN}', "field 'answer' is nan, which is not a number"),
        ('{"prompt": "p", "answer": 1, "m": [-Infinity]}', r"field 'm' at \[0\] is -inf"),
        ('{"prompt": "p", "answer": 1e999}', "field 'answer' is inf"),
        ('{"prompt": "p", "prompt": "q", "answer": 1}', "has the key 'prompt' twice"),
        (
            '{"prompt": [{"role": "user", "content": "a", "role": "user"}], "answer": 1}',
            r"'prompt' at \[0\] has the key 'role' tw",
        ),
        ('{"prompt": "p", "answer": ' + "9" * 5000 + "}", "field 'answer' has a number of 5000 digits; give it as text"),
        (
            '{"prompt": "p", "answer": ' + "[" * 100 + "]" * 100 + "}",
            "field 'answer' has lists and objects nested more than 64",
        ),
        (
            '{"prompt": "p", "answer": ' + "[" * 100_000 + "]" * 100_000 + "}",
            "lists and objects are nested more than 64 deep",
        ),
        ('{"prompt": "a\0", "answer": 1}', "column 14: not valid JSON"),
        ("\0\0\0", "column 1: not valid JSON"),
        ('\ufeff{"prompt": "a", "answer": 1}', "column 1: not valid JSON"),
        ("NaN", "expected an object, got a number"),
    ],
)
def test_lines_that_cannot_be_used_are_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "p", "answer": 1}\n' + text.encode())
    with pytest.raises(DataError, match=rf"a\.jsonl, line 2[:,] ?{'' if said.startswith('column') else '.*'}{said}"):
        read_rows(path)


def test_a_whole_pair_and_the_longest_numbers_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "\\ud83d\\ude00", "answer": ' + "9" * 4000 + ', "m": "\\u0000"}')
    assert read_rows(path) == [Row("😀", 10**4000 - 1, {"m": "\0"})]


# Files


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_files_that_cannot_be_read_are_named(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / name
    path.mkdir()
    with pytest.raises(DataError, match=rf"{name}: this is a folder"):
        read_rows(path)
    path.rmdir()
    write = write_jsonl if name == "a.jsonl" else write_parquet
    write(path, [{"prompt": "p", "answer": "a"}])
    for place in (path / "below", tmp_path / ("long" * 100 + name)):
        with pytest.raises(DataError, match=name):
            read_rows(place)

    def denied(self: Path, *_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "stat", denied)
    with pytest.raises(DataError, match=rf"{name}: cannot be read \(Permission denied\)"):
        read_rows(path)
    monkeypatch.undo()
    if name == "a.jsonl":
        monkeypatch.setattr("tandem.platform.system.files.os.open", denied)
        with pytest.raises(DataError, match=r"a\.jsonl: cannot be read \(Permission denied\)"):
            read_rows(path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_what_is_no_file_of_data_is_told_at_once(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe is not waited for, a gigabyte of nothing is not read."""
    os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match=f"{name} is a pipe, expected a file"):
        read_rows(tmp_path / name)
    (tmp_path / name).unlink()
    (tmp_path / name).touch()
    os.truncate(tmp_path / name, 2**30)
    monkeypatch.setattr("tandem.platform.system.files.LONGEST_LINE", 2**20)
    with pytest.raises(DataError, match=rf"{name}(, line 1: longer than|: not a readable parquet file)"):
        read_rows(tmp_path / name)


def test_data_may_be_a_link(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": "p", "answer": "a"}])
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "a.jsonl")
    assert len(read_rows(tmp_path / "b.jsonl")) == 1


def test_a_cut_parquet_file_is_named(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", [{"prompt": "p", "answer": "a"}])
    whole = path.read_bytes()
    for content in (b"", whole[:-20], whole[:40] + whole[60:], b"PAR1" + whole[4:40] + b"\0" * 60 + whole[100:]):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"a\.parquet"):
            read_rows(path)


def test_whatever_a_grader_says_of_an_answer_names_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    from tandem.platform.rewards import answers as data

    def overflows(sample: Any) -> float:
        raise OverflowError("too large")

    monkeypatch.setattr(data, "REWARDS", {"own": overflows})
    with pytest.raises(DataError, match=r"a\.jsonl, line 3: .*'own' cannot grade .*field 'gold'.*OverflowError: too large"):
        check_answers([Row("p", 1, {}, "a.jsonl, line 3", answer_key="gold")], ["own"])
