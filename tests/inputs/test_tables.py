"""Tables: files read as they are found in the wild, encoded with what the training split alone knows."""

from __future__ import annotations

import hashlib
import mmap
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from dataset import load
from inputs.columns import coded
from inputs.fingerprint import as_read
from inputs.tables import Encoder, Table, read_csv
from utils import BadOption


def table(numbers: list[list[float]], categories: list[list[str]]) -> Table:
    return Table(np.array(numbers, np.float64), [coded(column) for column in zip(*categories, strict=True)])


# ---------------------------------------------------------------- encoder


def test_encoder_by_hand():
    train = table([[1, 5], [3, 5], [np.nan, 5], [5, 5]], [["b"], ["a"], ["b"], [""]])
    encoder = Encoder.fit(train)
    spread = (8 / 3) ** 0.5  # of 1, 3, 5; the missing value does not count
    assert encoder.mean == [3, 5]
    np.testing.assert_allclose(encoder.std, [spread, 1])  # the constant column keeps its unit
    assert encoder.levels == [["", "a", "b"]]
    wanted = [[-2 / spread, 0, 0, 0, 1], [0, 0, 0, 1, 0], [0, 0, 0, 0, 1], [2 / spread, 0, 1, 0, 0]]
    found = encoder.encode(train)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, rtol=1e-7)

    test = table([[7, 6], [np.nan, np.nan]], [["a longer one, never seen"], ["a"]])
    np.testing.assert_allclose(encoder.encode(test), [[4 / spread, 1, 0, 0, 0], [0, 0, 0, 1, 0]], rtol=1e-7)


def test_encoder_survives_json():
    encoder = Encoder.fit(table([[1 / 3], [2 / 7]], [["x"], ["y"]]))
    assert Encoder.from_json(encoder.to_json()) == encoder


@pytest.mark.parametrize("constant", [0.0, 0.1, 1 / 3, 1e8 + 0.1, 1e-20])
def test_a_constant_column_stays_zero(constant):
    """Rounding gives 0.1 seven times a standard deviation of 1e-17; divided by that, noise would become a feature."""
    rows = Table.of(np.full((7, 1), constant))
    encoder = Encoder.fit(rows)
    assert encoder.std == [1.0]
    assert np.abs(encoder.encode(rows)).max() <= 1e-15 * max(constant, 1)


def test_a_column_that_is_missing_everywhere_stays_zero():
    rows = table([[np.nan, 1], [np.nan, 3]], [["a"], ["a"]])
    assert Encoder.fit(rows).encode(rows).tolist() == [[0, -1, 1], [0, 1, 1]]


def test_rows_with_other_columns_are_refused():
    encoder = Encoder.fit(table([[1, 2]], [["a"]]))
    rule = "^dataset must have the columns that the model was trained on, 2 of numbers and 1 of categories, not 3 and 0"
    with pytest.raises(BadOption, match=rule):
        encoder.encode(Table.of(np.zeros((2, 3))))
    with pytest.raises(BadOption, match=r"^dataset has the rows of a table, and the model reads images"):
        Encoder.from_json({"mean": [0.5], "std": [0.2]})


def test_indexing_a_table_keeps_rows_together():
    rows = table([[1], [2], [3]], [["a"], ["b"], ["c"]])[np.array([2, 0])]
    assert (rows.numbers.tolist(), rows.categories.tolist(), len(rows)) == ([[3], [1]], [["c"], ["a"]], 2)


# ---------------------------------------------------------------- CSV

TEXT = """width,color,height,kind
1.5,red,,yes
2e1,"blue, dark",3,no
?,red,-4,yes
,na,5.0,no
"""


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_csv(delimiter, tmp_path):
    file = tmp_path / "a.csv"
    file.write_text(TEXT.replace('"blue, dark"', "BLUE").replace(",", delimiter).replace("BLUE", '"blue, dark"'))
    rows, labels = read_csv(file, "kind")
    np.testing.assert_array_equal(rows.numbers, [[1.5, np.nan], [20, 3], [np.nan, -4], [np.nan, 5]])
    assert rows.categories.tolist() == [["red"], ["blue, dark"], ["red"], [""]]
    assert labels.tolist() == ["yes", "no", "yes", "no"]


def test_csv_as_spreadsheets_write_it(tmp_path):
    file = tmp_path / "a.csv"
    file.write_bytes('\ufeffa; y\r\n\r\n1 ; "é"\r\n2; b\r\n\r\n'.encode())  # a byte order mark, blank lines, blanks around values
    rows, labels = read_csv(file, "y")
    assert rows.numbers.tolist() == [[1], [2]]
    assert labels.tolist() == ["é", "b"]
    assert read_csv(file, "a")[1].tolist() == ["1", "2"]  # any column may be the target


def test_two_columns_of_one_name_are_two_columns(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text("a,a,y,a\n1,2,p,x\n3,4,q,z\n")
    rows, labels = read_csv(file, "y")
    assert rows.numbers.tolist() == [[1, 2], [3, 4]]
    assert rows.categories.tolist() == [["x"], ["z"]]
    assert labels.tolist() == ["p", "q"]


def test_csv_as_a_data_set(tmp_path):
    """Numbers, categories and labels stay with their rows; means come from the training split."""
    file = tmp_path / "odd:name.csv"
    lines = [f"{n},{'uvw'[n % 3]},{'pq'[n % 2]}" for n in range(101)]
    file.write_text("n,letter,y\n" + "\n".join(lines) + "\n")
    data = load(f"csv:{file}:y", val_fraction=0.2)
    assert (data.kind, data.shape, data.classes) == ("table", (4,), ("p", "q"))
    assert data.val is not None
    (mean,), (std,) = data.fitted["mean"], data.fitted["std"]
    seen = []
    for split in (data.train, data.val, data.test):
        numbers = np.rint(split.x[:, 0] * std + mean).astype(int)
        assert split.y.tolist() == (numbers % 2).tolist()
        assert split.x[:, 1:].argmax(1).tolist() == (numbers % 3).tolist()
        seen.append(numbers.tolist())
    assert sorted(n for numbers in seen for n in numbers) == list(range(101))
    np.testing.assert_allclose(mean, np.mean(seen[0]), rtol=1e-12)
    np.testing.assert_allclose(std, np.std(seen[0]), rtol=1e-12)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("a,b\n1,2\n", r"has no column 'y'; it has a, b, got"),
        ("a,Y2\n1,2\n", r"has no column 'y' \(did you mean 'Y2'\?\); it has a, Y2"),
        ("a,y\n", "must be a CSV file with a header and rows"),
        ("", "must be a CSV file with a header and rows"),
        ("a,y\n1,2\n1\n", "has 2 columns, and 1 in line 3"),
        ("a,y\n1,2,3\n", "has 2 columns, and 3 in line 2"),
        ("y\n1\n2\n", "must have columns besides 'y'"),
        ("a,y\n1,p\n2,\n", "has rows without a 'y'"),
        ("a,y\n1,p\n2,?\n", "has rows without a 'y'"),
        ('a,y\n1,2\n"' + "x" * 140_000 + "\n1,2\n", r"must be a CSV file \(a quote opens in line 3 and does not close\)"),
        ('a,y\n"' + "x" * (1 << 25) + "\n1,2\n", r"must be a CSV file \(a line is longer than 1 MB, or a quote does not close\)"),
        ("a,y,y\n1,p,p\n2,q,q\n", "must have one column 'y', and has 2"),
        ("a,y\n1,p\ninf,q\n", r"must hold finite numbers, up to 3.4e\+38; column 'a' has inf in line 3"),
        ("a,b,y\n1,2,p\n1,-1e39,q\n", r"must hold finite numbers, up to 3.4e\+38; column 'b' has -1e\+39 in line 3"),
    ],
)
def test_a_wrong_csv(text, rule, tmp_path):
    file = tmp_path / "a.csv"
    file.write_text(text)
    with pytest.raises(BadOption, match=f"^dataset {rule}"):
        load(f"csv:{file}:y")


def test_a_csv_that_can_not_be_read(tmp_path):
    file = tmp_path / "a.csv"
    with pytest.raises(BadOption, match=r"^dataset must be a file that can be read \(No such file or directory\), got '.*a.csv'"):
        load(f"csv:{file}:y")
    file.write_bytes(b"a,y\n\xff\xfe,1\n")
    with pytest.raises(BadOption, match=r"^dataset must be a file that can be read \(not UTF-8 text\)"):
        load(f"csv:{file}:y")


@pytest.mark.parametrize(
    ("cells", "found"),
    [
        (["a\u2028b", "c\x85d", "e\x0cf"], ["a\u2028b", "c\x85d", "e\x0cf"]),  # ends of lines for str.splitlines, not for a CSV file
        (['"a\nb"', '"c, ""d"""', "e"], ["a\nb", 'c, "d"', "e"]),
        (["+1", ".5", "1e3"], [1, 0.5, 1000]),
        ([" 1 ", "NA", "-2."], [1, np.nan, -2]),
        (["nan", "None", "?"], [np.nan] * 3),
        (["none", "x", "null"], ["", "x", ""]),
        (["1_0", "0x1", "1"], ["1_0", "0x1", "1"]),
    ],
)
def test_what_a_cell_is(cells, found, tmp_path):
    file = tmp_path / "a.csv"
    file.write_text("y,a\n" + "".join(f"{i},{cell}\n" for i, cell in enumerate(cells)), encoding="utf-8")
    rows, labels = read_csv(file, "y")
    assert labels.tolist() == ["0", "1", "2"]
    if isinstance(found[0], str):
        assert rows.categories[:, 0].tolist() == found
    else:
        np.testing.assert_array_equal(rows.numbers[:, 0], found)


def test_a_class_named_none_is_a_class(tmp_path, capsys):
    """Only an empty label, or a question mark, is none."""
    file = tmp_path / "a.csv"
    file.write_text("a,y\n" + "".join(f"{n},{('none', 'nan', 'NA', 'mild')[n % 4]}\n" for n in range(40)))
    assert load(f"csv:{file}:y").classes == ("NA", "mild", "nan", "none")
    assert "'y' is 'NA' or 'nan' or 'none' in some rows; that is a class like the others" in capsys.readouterr().err


def test_line_ends_and_blank_lines_of_all_kinds(tmp_path):
    file = tmp_path / "a.csv"
    for end in ("\n", "\r\n", "\r"):
        file.write_bytes(f"  {end}{end}a,y{end}1,p{end}  {end}2,q{end}".encode())
        rows, labels = read_csv(file, "y")
        assert (rows.numbers.tolist(), labels.tolist()) == ([[1], [2]], ["p", "q"])


def test_categories_of_other_lengths_match_their_level():
    """Codes by binary search: a category that the training split lacks must not match its neighbor in the order."""
    seen = ["", "b", "bb", "é"]
    encoder = Encoder([], [], [seen])
    asked = ["a", "bb", "ba", "", "zz", "é", "bbb", "b"]
    found = encoder.encode(Table(np.empty((len(asked), 0)), [coded(asked)]))
    assert found.tolist() == [[float(a == level) for level in seen] for a in asked]


def test_numbers_that_overflow_when_standardized_are_refused():
    rule = r"^dataset has numbers that overflow float32 when standardized and squared, in column 2 of numbers"
    for spread, number in ((1e-9, 1e38), (1e-9, -1e38), (1.0, 3e38), (1e-9, 2e9)):
        with pytest.raises(BadOption, match=rule):
            Encoder([0.0, 1.0], [1.0, spread], []).encode(Table.of(np.array([[1.0, 1.0], [3.0, number]])))
    found = Encoder([0.0], [1e-9], []).encode(Table.of(np.array([[9e8]])))
    assert np.isfinite(np.square(found).sum())


def test_text_far_down_in_a_column_of_numbers_makes_it_text_from_its_first_row(tmp_path, monkeypatch):
    monkeypatch.setattr("inputs.columns.BLOCK", 1 << 10)
    file = tmp_path / "a.csv"
    file.write_text("n,a,y,b\n" + "".join(f"{n},{n:03d},{'pq'[n % 2]},{n if n < 998 else '1.50x'}\n" for n in range(999)))
    rows, labels = read_csv(file, "y")
    assert rows.numbers.tolist() == [[n, n] for n in range(999)]
    assert rows.categories[:, 0].tolist() == [*map(str, range(998)), "1.50x"]
    assert labels.tolist() == ["pq"[n % 2] for n in range(999)]
    file.write_text("a,y\n" + "".join(f"{n},p\n" for n in range(999)) + "7\n")
    with pytest.raises(BadOption, match=r"^dataset has 2 columns, and 1 in line 1001"):
        read_csv(file, "y")


def test_a_table_that_memory_can_not_hold_is_refused(monkeypatch):
    monkeypatch.setattr("inputs.memory.free_memory", lambda: 1000.0)
    encoder = Encoder([0.0], [1.0], [[str(n) for n in range(100)]])
    table_of = r"a table of 101 columns \(one of categories has 100 of them\)"
    rule = f"^dataset asks for more memory than the 1 kB that are free: {table_of} takes about 1.21 kB, got '3 rows'"
    with pytest.raises(BadOption, match=rule):
        encoder.encode(Table(np.zeros((3, 1)), [coded("123")]))


def test_a_target_of_measures_leaves_nothing_to_test(tmp_path):
    """Each value is a class of its own, and a class keeps a row for training."""
    file = tmp_path / "a.csv"
    file.write_text("a,y\n" + "".join(f"{n},{n / 7}\n" for n in range(23)))
    with pytest.raises(BadOption, match=r"^dataset must leave at least 1 test row after the splits \(0 left\)"):
        load(f"csv:{file}:y")


# ---------------------------------------------------------------- memory


def wide_csv(file: Path, rows: int) -> None:
    """Eight numbers, three categories of long text, and a label."""
    rng = np.random.default_rng(0)
    levels = [np.array([f"{letter * 40}{n}" for n in range(5)]) for letter in "abc"]
    columns = [*np.char.mod("%.4f", rng.normal(size=(8, rows))), *(level[rng.integers(0, 5, rows)] for level in levels)]
    columns.append(np.array(["no", "yes"])[rng.integers(0, 2, rows)])
    names = ",".join([*(f"x{n}" for n in range(8)), "a", "b", "c", "y"])
    file.write_text(names + "\n" + "\n".join(map(",".join, zip(*columns, strict=True))) + "\n")


def test_a_csv_takes_little_more_memory_than_what_the_model_reads(tmp_path, monkeypatch):
    """23 numbers a row are read as float32, 92 bytes. Categories as text would take 500 bytes a row, the numbers as they are 64."""
    monkeypatch.setattr("inputs.memory.HELD", 1 << 16)
    peaks, file = list[int](), tmp_path / "a.csv"
    for rows in (100, 30_000, 90_000):  # the first imports what is needed
        wide_csv(file, rows)
        tracemalloc.start()
        try:
            data = load(f"csv:{file}:y")
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert data.shape == (23,)
    assert (peaks[2] - peaks[1]) / 60_000 < 2 * 92  # what blocks of it take does not grow with the file


def is_mapped(x: object) -> bool:
    while isinstance(x, np.ndarray):
        x = x.base
    return isinstance(x, mmap.mmap)


def test_numbers_that_wait_in_a_file_are_the_same(tmp_path, monkeypatch):
    """Also where the disk has no room for them: then they wait in memory."""
    file = tmp_path / "a.csv"
    wide_csv(file, 1009)
    in_memory = load(f"csv:{file}:y")
    monkeypatch.setattr("inputs.memory.HELD", 0)
    assert is_mapped(read_csv(file, "y")[0].numbers)
    in_file = load(f"csv:{file}:y")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    assert not is_mapped(read_csv(file, "y")[0].numbers)
    for found in (in_file, load(f"csv:{file}:y")):
        assert (found.summary, found.fitted) == (in_memory.summary, in_memory.fitted)
        assert (found.train.x == in_memory.train.x).all()


def test_hashes_of_a_table_are_of_all_its_values(monkeypatch):
    """By hand, of whole arrays: a run that began with an older version must find its rows again."""
    numbers = np.random.default_rng(0).normal(size=(101, 3))
    letters = [["ab"[n % 2] * (1 + n % 3), "é" if n % 5 else ""] for n in range(101)]
    rows = Table(numbers, [coded(column) for column in zip(*letters, strict=True)])[np.arange(100, -1, -2)]
    y = np.arange(len(rows))
    whole = hashlib.sha256(y.tobytes())
    whole.update(b"f (51, 3)" + numbers[::-2].tobytes() + b"U (51, 2)")
    whole.update("".join(f"{value}\0" for row in letters[::-2] for value in row).encode())
    for at_once in (1, 7 * 128, 1 << 22):
        monkeypatch.setattr("inputs.rows.AT_ONCE", at_once)
        assert as_read(rows, y) == whole.hexdigest()
