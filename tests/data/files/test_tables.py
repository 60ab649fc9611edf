"""Tables: columns become inputs and targets, and errors name the file and the row."""

import bz2
import gzip
import os
import sys
from functools import partial

import numpy as np
import pandas
import pytest
from sklearn.datasets import load_diabetes
from sklearn.linear_model import RidgeCV

from tfopt.data import csv, diabetes, parquet
from tfopt.errors import ConfigError


@pytest.fixture
def frame():
    generator = np.random.default_rng(0)
    return pandas.DataFrame(
        {
            "a": generator.random(60),
            "b": np.arange(60),
            "kind": np.array(["rose", "iris", "aster"])[np.arange(60) % 3],
            "price": np.arange(60) * 2.5,
        }
    )


@pytest.fixture
def file(tmp_path, frame):
    frame.to_csv(tmp_path / "table.csv", index=False)
    return tmp_path / "table.csv"


@pytest.fixture(params=["csv", "parquet"])
def read(request, tmp_path, frame):
    """The same table in both formats: a function of the arguments of the source."""
    path = tmp_path / f"table.{request.param}"
    source = {"csv": csv, "parquet": parquet}[request.param]

    def read(table=frame, **arguments):
        table.to_csv(path, index=False) if request.param == "csv" else table.to_parquet(path)
        return source(path=path, **arguments)

    return read


def test_text_is_a_class_and_numbers_are_values(read, frame):
    examples = read(target="kind", inputs=["b", "a"], validation_fraction=0.1)
    assert (examples.class_names, examples.outputs) == (("aster", "iris", "rose"), 3)
    numbers = []
    for part, size in (("train", 42), ("validation", 6), ("test", 12)):
        x, y = examples.arrays(part)
        assert (x.shape, x.dtype, y.dtype, len(y)) == ((size, 2), np.float32, np.int32, size)
        rows = x[:, 0].astype(int)
        np.testing.assert_array_equal(x[:, 1], frame["a"].to_numpy(np.float32)[rows])
        assert [examples.class_names[each] for each in y] == frame["kind"][rows].tolist()
        numbers += rows.tolist()
    assert sorted(numbers) == list(range(60))
    values = read(target=["price", "a"], inputs=["b"])
    assert (values.outputs, values.class_names, values.y_train.shape) == (2, (), (48, 2))
    np.testing.assert_array_equal(values.y_train[:, 0], values.x_train[:, 0] * 2.5)


def test_inputs_by_name_and_all_columns(read):
    examples = read(target="kind", inputs={"one": ["a"], "both": ["a", "b"]})
    assert examples.input_shape == {"one": (1,), "both": (2,)}
    np.testing.assert_array_equal(examples.x_train["one"][:, 0], examples.x_train["both"][:, 0])
    assert read(target="kind").input_shape == (3,)
    with pytest.raises(ConfigError, match=r"Column 'kind' must hold numbers. Received: 'rose' in row \d of .*table"):
        read(target="price")


def test_a_whole_number_can_be_a_class(read, frame):
    examples = read(target="b", inputs=["price"])
    assert (examples.outputs, examples.y_train.shape) == (1, (48, 1))
    with pytest.raises(ConfigError, match="at least two examples"):
        read(target="b", inputs=["price"], classes=True)


def test_several_files_are_one_table(tmp_path, frame):
    frame[:30].to_csv(tmp_path / "1.csv", index=False)
    frame[30:].to_csv(tmp_path / "2.csv", index=False)
    for path in (tmp_path, tmp_path / "*.csv", [tmp_path / "1.csv", tmp_path / "2.csv"]):
        examples = csv(path=path, target="kind", inputs=["b"])
        assert sorted([*examples.x_train[:, 0], *examples.x_test[:, 0]]) == list(range(60))
    frame[:0].to_csv(tmp_path / "3.csv", index=False)
    assert csv(path=tmp_path, target="kind", inputs=["b"]).size("train") == 48


def test_a_forecast_keeps_the_order_of_time(read, frame):
    examples = read(
        target="price", inputs=["b", "a"], window=5, horizon=2, test_fraction=0.25, validation_fraction=0.25
    )
    assert (examples.input_shape, examples.outputs) == ((5, 2), 2)
    rows = {}
    for part in ("train", "validation", "test"):
        x, y = examples.arrays(part)
        assert y.shape[1:] == (2, 1)
        start = x[:, 0, 0].astype(int)
        np.testing.assert_array_equal(x[:, :, 0], start[:, None] + np.arange(5))
        np.testing.assert_array_equal(y[:, :, 0], (start[:, None] + 5 + np.arange(2)) * 2.5)
        assert start.tolist() != sorted(start)
        rows[part] = {row for each in start for row in range(each, each + 7)}
    assert rows == {"train": {*range(30)}, "validation": {*range(30, 45)}, "test": {*range(45, 60)}}
    assert read(target="price", inputs=["b"], window=5, horizon=2, stride=6).size("train") == 7
    with pytest.raises(ConfigError, match=r"at least window . horizon rows. Received: window=12"):
        read(target="price", inputs=["b"], window=12, horizon=2)


def test_each_file_is_a_series_of_its_own(tmp_path, frame):
    frame[:30].to_csv(tmp_path / "1.csv", index=False)
    frame[30:].to_csv(tmp_path / "2.csv", index=False)
    examples = csv(path=tmp_path, target="b", inputs=["b"], window=3, test_fraction=0.2)
    for part in ("train", "test"):
        for inputs, targets in examples.decoded(part).as_numpy_iterator():
            assert (inputs[0, 0] < 30) == (targets[0, 0] < 30)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text.replace("kind", "type", 1), ("without 'kind'", "'a', 'b', 'type', 'price'")),
        (lambda text: text.replace("rose,2.5", ",2.5") if "rose,2.5\n" in text else text.replace("iris,2.5", ",2.5"),
         ("1 rows that have empty cells", "column 'kind', row 3")),
        (lambda text: text.replace(",1,iris", ",1e39,iris"), ("'b' must hold numbers below 3.4e38", "1e+39 in row 3")),
        (lambda text: text.replace(",1,iris", ",1e400,iris").replace(",3,rose", ",-inf,rose"),
         ("'b' must hold numbers. Received: inf in row 3", "and 1 more such cells")),
        (lambda text: text.replace("\n0.0", "\nmany"), ("Column 'a' must hold numbers", "row ")),
        (lambda text: text.replace(",2.5\n", ",2.5,7,8\n"), ("Row #3", "as many cells")),
        (lambda text: "", ("names of columns",)),
        (lambda text: text.replace("rose", "r\xf6se"), ("must be in UTF-8", "in line 2")),
    ],
)  # fmt: skip
def test_files_that_do_not_fit_are_refused_by_name(change, words, file):
    content = change(file.read_text())
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError) as caught:
        csv(path=file, target="kind", inputs=["a", "b"])
    for each in ("table.csv", *words):
        assert each in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda content: content.replace(b",", b";"), "Set delimiter=';'"),
        (lambda content: content.replace(b",", b"\t"), r"Set delimiter='\t'"),
        (gzip.compress, "is compressed by gzip. Decompress it."),
        (bz2.compress, "is compressed by bzip2"),
        (lambda content: content.decode().encode("utf-16"), "is in UTF-16. Save it as UTF-8."),
        (lambda content: content.decode().encode("utf-16-be"), "holds zero bytes, so it is in UTF-16"),
    ],
)
@pytest.mark.parametrize("inputs", [None, ["a", "b"]])
def test_other_files_than_text_with_commas_are_told(change, words, inputs, file):
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(ConfigError) as caught:
        csv(path=file, target="kind", inputs=inputs)
    assert words in str(caught.value)
    assert "Correct the names" not in str(caught.value)


def test_a_mark_of_utf_8_is_no_part_of_a_name(file):
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert csv(path=file, target="kind", inputs=["a", "b"]).outputs == 3


def test_what_a_folder_of_tables_holds_besides_is_noted(file):
    file.rename(file.with_name("table.CSV"))
    file.with_name("._table.csv").write_bytes(b"\0")
    file.with_name("more.csv.gz").write_bytes(gzip.compress(b"a,b"))
    file.with_name("older").mkdir()
    examples = csv(path=file.parent, target="kind", inputs=["a", "b"])
    assert examples.notes == ("Files and folders that are no .csv files were not used: 2 (older, more.csv.gz).",)
    os.mkfifo(file)
    with pytest.raises(ConfigError, match=r"A table must be a file on disk. Received: .*table.csv', a pipe"):
        csv(path=file, target="kind")


@pytest.mark.parametrize("first", [2**24 + 1, 2**53 + 1, -(2**63)])
def test_whole_numbers_that_float32_rounds_are_noted(first, read, frame):
    frame["id"] = [first, *range(59)]
    frame["class"] = frame["b"] % 2 + 2**53
    read = partial(read, table=frame)
    examples = read(target="price", inputs=["a", "id"])
    note = "holds whole numbers above 16,777,216, which float32 rounds: 1 of 60."
    assert note in examples.notes[0]
    assert np.abs(np.concatenate([examples.x_train, examples.x_test])[:, 1]).max() == np.float32(abs(first))
    assert read(target="class", inputs=["a"], classes=True).class_names == (str(2**53), str(2**53 + 1))


def test_rows_with_empty_cells_can_be_dropped(file):
    lines = file.read_text().splitlines()
    lines[3] = "," + lines[3].split(",", 1)[1]
    file.write_text("\n".join(lines))
    examples = csv(path=file, target="kind", inputs=["a", "b"], missing="drop", test_fraction=0.5)
    assert examples.notes == ("Rows with empty cells were left out: 1 of 60 in table.csv.",)
    assert 2 not in [*examples.x_train[:, 1], *examples.x_test[:, 1]]


def windows_of(examples, part):
    return sorted(
        tuple(int(value) for each in pair for value in each.ravel())
        for pair in examples.decoded(part).as_numpy_iterator()
    )


def test_windows_do_not_reach_over_rows_that_were_left_out(read, tmp_path, frame):
    frame.loc[[0, 20, 21, 45], "a"] = np.nan
    frame.to_csv(tmp_path / "table.csv", index=False)
    frame.to_parquet(tmp_path / "table.parquet")
    for stride in (1, 4):
        options = {"window": 3, "horizon": 2, "stride": stride, "test_fraction": 0.5, "missing": "drop"}
        examples = read(target="b", inputs=["b", "a"], **options)
        found = {
            part: [int(x[0, 0]) for x, _ in examples.decoded(part).as_numpy_iterator()] for part in ("train", "test")
        }
        every = {"train": range(0, 26, stride), "test": range(30, 56, stride)}
        whole = {
            part: [first for first in starts if not {0, 20, 21, 45} & {*range(first, first + 5)}]
            for part, starts in every.items()
        }
        assert {part: sorted(starts) for part, starts in found.items()} == whole
        for part in ("train", "test"):
            for x, y in examples.decoded(part).as_numpy_iterator():
                assert [*x[:, 0], *y[:, 0]] == [*range(int(x[0, 0]), int(x[0, 0]) + 5)]
        total, kept = sum(map(len, every.values())), sum(map(len, whole.values()))
        assert examples.notes[0].startswith("Rows with empty cells were left out: 4 of 60")
        assert examples.notes[1:] == (
            f"Windows that hold a row with an empty cell were left out: {total - kept} of {total}.",
        )


def test_a_series_with_too_many_gaps_is_refused(read, tmp_path, frame):
    frame.loc[::4, "a"] = np.nan
    frame.to_csv(tmp_path / "table.csv", index=False)
    frame.to_parquet(tmp_path / "table.parquet")
    with pytest.raises(ConfigError, match=r"the train part. Windows that hold a row .* left out: 54 of 54. Set a"):
        read(target="b", inputs=["a"], window=3, missing="drop")


def test_a_line_without_text_is_a_gap_in_a_table_of_one_column(tmp_path):
    (tmp_path / "one.csv").write_text("a\n" + "\n".join("" if row == 5 else str(row) for row in range(20)) + "\n")
    with pytest.raises(ConfigError, match="the first in column 'a', row 7"):
        csv(path=tmp_path, target="a", inputs=["a"], window=3)
    examples = csv(path=tmp_path, target="a", inputs=["a"], window=3, test_fraction=0.4, missing="drop")
    assert windows_of(examples, "train") == [(0, 1, 2, 3), (1, 2, 3, 4), (6, 7, 8, 9), (7, 8, 9, 10), (8, 9, 10, 11)]


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_a_column_that_is_there_twice_is_refused(ending, tmp_path):
    import pyarrow
    from pyarrow import csv as csv_writer
    from pyarrow import parquet as parquet_writer

    table = pyarrow.Table.from_arrays([pyarrow.array(range(10))] * 4, names=["a", "b", "a", "price"])
    {"csv": csv_writer.write_csv, "parquet": parquet_writer.write_table}[ending](table, tmp_path / f"table.{ending}")
    read = {"csv": csv, "parquet": parquet}[ending]
    for arguments in ({"inputs": ["a"], "target": "price"}, {"inputs": ["b"], "target": "a"}, {"target": "price"}):
        with pytest.raises(ConfigError, match=rf"a name of its own. Received: '.*table.{ending}' with 2 columns 'a'"):
            read(path=tmp_path, **arguments)
    assert read(path=tmp_path, inputs=["b"], target="price").size("train") == 8


def write_classes(path, cells):
    path.write_text("x,kind\n" + "".join(f"{row},{cells[row % len(cells)]}\n" for row in range(60)))


def classes_by_row(examples):
    pairs = [pair for part in ("train", "test") for pair in examples.decoded(part).as_numpy_iterator()]
    return {int(x[0]): examples.class_names[y] for x, y in pairs}


@pytest.mark.parametrize(
    ("cells", "classes", "names"),
    [
        (["NA", "N/A", "nan", "null", "EU", '"NULL"'], None, ("EU", "N/A", "NA", "NULL", "nan", "null")),
        (["true", "True", "false"], None, ("True", "false", "true")),
        (["10", "9", "1", "01"], True, ("01", "1", "9", "10")),
        (["1.0", "1", "2"], True, ("1", "1.0", "2")),
    ],
)
def test_a_class_is_what_a_cell_spells(cells, classes, names, tmp_path):
    write_classes(tmp_path / "table.csv", cells)
    examples = csv(path=tmp_path, target="kind", classes=classes)
    assert examples.class_names == names
    assert classes_by_row(examples) == {row: cells[row % len(cells)].strip('"') for row in range(60)}


def test_files_may_spell_classes_as_numbers_and_as_text(tmp_path):
    write_classes(tmp_path / "1.csv", ["1", "2"])
    write_classes(tmp_path / "2.csv", ["1", "x"])
    assert csv(path=tmp_path, target="kind").class_names == ("1", "2", "x")


@pytest.mark.parametrize(
    ("cells", "classes"), [(["rose", "iris", ""], None), (["rose", "iris", '""'], None), (["1", "2", "NA"], True)]
)
def test_empty_cells_of_classes(cells, classes, tmp_path):
    write_classes(tmp_path / "table.csv", cells)
    with pytest.raises(ConfigError, match="20 rows that have empty cells, the first in column 'kind', row 4"):
        csv(path=tmp_path, target="kind", classes=classes)
    examples = csv(path=tmp_path, target="kind", classes=classes, missing="drop")
    assert classes_by_row(examples) == {row: cells[row % 3] for row in range(60) if row % 3 < 2}


@pytest.mark.parametrize("damage", ["cut", "flipped", "other"])
def test_damaged_parquet_files_are_refused(damage, tmp_path, frame):
    import pyarrow
    from pyarrow import parquet as writer

    path = tmp_path / "table.parquet"
    writer.write_table(pyarrow.Table.from_pandas(frame), path, write_page_checksum=True, compression="none")
    content = bytearray(path.read_bytes())
    if damage == "cut":
        content = content[: len(content) // 2]
    elif damage == "flipped":
        content[200] ^= 1
    else:
        content = b"a,b\n1,2\n"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"A Parquet file must be whole. Received: '.*table.parquet'"):
        parquet(path=path, target="price", inputs=["a"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"path": "/missing/*.csv"}, "which names none"),
        ({"missing": "fill"}, "missing must be"),
        ({"classes": True, "window": 3}, "classes must be False for a forecast"),
        ({"inputs": {"one": ["a"]}, "window": 3, "target": "price"}, "a list of columns for a forecast"),
        ({"test_fraction": 1.0}, "test_fraction must be"),
        ({"inputs": []}, "columns for inputs"),
        ({"window": 0, "target": "b"}, "window must be a whole number of at least 1 or None"),
        ({"window": "5", "target": "b"}, "window must be a whole number of at least 1 or None"),
        ({"inputs": "a"}, "inputs must be a tuple of strings"),
        ({"inputs": {"one": "a"}}, "inputs must be a tuple of strings"),
        ({"delimiter": "::"}, "one character"),
        ({"delimiter": 5}, "one character"),
    ],
)
def test_settings_out_of_range_are_refused(arguments, words, file):
    with pytest.raises(ConfigError, match=words.replace("*", r"\*")):
        csv(**{"path": file, "target": "kind", "inputs": ["a"], **arguments})


def test_without_pyarrow_the_error_says_what_to_install(file, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # Python then refuses to import it
    with pytest.raises(ConfigError, match=r"pip install 'tfopt\[tables\]'"):
        csv(path=file, target="kind")


def test_a_word_in_a_column_of_numbers_is_named(tmp_path):
    rows = [f"{row},{row / 2}" for row in range(40)]
    rows[7] = "7,bad"
    (tmp_path / "a.csv").write_text("\n".join(["x,y", *rows]))
    with pytest.raises(ConfigError, match=r"Column 'y' must hold numbers. Received: 'bad' in row 9 .*classes=True"):
        csv(path=tmp_path / "a.csv", target="y")


def test_the_records_of_patients_are_the_real_ones_in_standard_deviations():
    examples = diabetes()
    assert (examples.input_shape, examples.outputs, examples.name) == ((10,), 1, "diabetes")
    rows, values = load_diabetes(return_X_y=True)
    ours = np.concatenate([examples.x_train, examples.x_test])
    np.testing.assert_allclose(np.sort(ours, axis=0), np.sort(rows, axis=0) * np.sqrt(len(rows)), atol=1e-4)
    targets = np.concatenate([examples.y_train, examples.y_test])
    np.testing.assert_allclose(np.sort(targets[:, 0]), np.sort((values - values.mean()) / values.std()), atol=1e-5)


def test_ridge_regression_on_the_records_has_the_error_that_the_script_of_the_recipe_quotes():
    examples = diabetes()
    ridge = RidgeCV().fit(examples.x_train, examples.y_train[:, 0])
    error = np.abs(ridge.predict(examples.x_test) - examples.y_test[:, 0]).mean()
    assert len(examples.y_test) == 89
    assert error == pytest.approx(0.60, abs=0.005)


def test_the_index_that_pandas_writes_is_no_input(tmp_path):
    frame = pandas.DataFrame({"a": np.arange(20) ** 2, "kind": ["u", "v"] * 10}, index=np.arange(20) + 7)
    frame.to_csv(tmp_path / "t.csv")
    frame.to_parquet(tmp_path / "t.parquet")
    frame.rename_axis("row").to_parquet(tmp_path / "named.parquet")
    for source, file, name in ((csv, "t.csv", ""), (parquet, "t.parquet", "__index_level_0__")):
        examples = source(path=tmp_path / file, target="kind")
        assert examples.input_shape == (1,)
        assert examples.notes == (f"Row names are no inputs: column {name!r}. To use it, name it in inputs=[...].",)
        assert source(path=tmp_path / file, target="kind", inputs=["a", name]).input_shape == (2,)
    assert "'row'" in parquet(path=tmp_path / "named.parquet", target="kind").notes[0]


@pytest.mark.parametrize(
    ("columns", "arguments", "note"),
    [
        ({"id": range(20)}, {}, "An input only counts the rows: 'id'"),
        ({"a": np.arange(20) ** 2}, {"target": "a", "inputs": ["a", "b"]}, "The target is also an input: 'a'"),
        ({"time": 1.6e9 + np.arange(20) ** 2 / 8}, {}, "20 different ones become 1. Subtract their smallest"),
        ({"kind": ["u", "v", "u ", "V"] * 5}, {}, "capital letters: 'V' and 'v', 'u' and 'u '"),
    ],
)
def test_inputs_and_classes_that_may_be_a_mistake_are_noted(tmp_path, columns, arguments, note):
    frame = pandas.DataFrame({"b": np.arange(20) ** 2, "kind": ["u", "v"] * 10, **columns})
    frame.to_csv(tmp_path / "t.csv", index=False)
    assert note in " ".join(csv(path=tmp_path / "t.csv", **{"target": "kind", **arguments}).notes)


def test_a_file_without_a_line_of_names_is_noted(tmp_path):
    file = tmp_path / "t.csv"
    rows = [f"{row % 2},{row / 8},{row / 4}" for row in range(20)]
    for names, notes in (("7,0.5,1.5", 1), ("0,1,2", 0), ("2019,2020,2021", 0)):
        file.write_text("\n".join([names, *rows]))
        examples = csv(path=file, target=names[: names.index(",")])
        assert len(examples.x_train) + len(examples.x_test) == len(rows)
        assert [note.startswith("Line 1 of t.csv was read as the names") for note in examples.notes] == [True] * notes


@pytest.mark.parametrize("cells", ["1,000 2,000", "$3 $4", "40% 50%", "0,5 1,5", "1_0 2_0"])
def test_numbers_as_people_write_them_do_not_become_classes_or_other_numbers(tmp_path, cells):
    pandas.DataFrame({"a": np.arange(20) ** 2, "price": cells.split() * 10}).to_csv(tmp_path / "t.csv", index=False)
    if "_" not in cells:
        with pytest.raises(ConfigError, match="Column 'price' must hold numbers"):
            csv(path=tmp_path / "t.csv", target="price")
    with pytest.raises(ConfigError, match="Column 'price' must hold numbers"):
        csv(path=tmp_path / "t.csv", target="a", inputs=["price"])
    assert csv(path=tmp_path / "t.csv", target="price", classes=True).outputs == 2


def test_a_table_without_rows_and_a_header_in_latin_1_are_named(tmp_path):
    (tmp_path / "t.csv").write_text("a,kind\n")
    with pytest.raises(ConfigError, match=r"A table must have rows.*t.csv"):
        csv(path=tmp_path / "t.csv", target="kind")
    (tmp_path / "t.csv").write_bytes("gr\u00f6\u00dfe,kind\n1,u\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"must be in UTF-8.*line 1"):
        csv(path=tmp_path / "t.csv", target="kind")
